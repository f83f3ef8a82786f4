"""Benchmarks: workload x implementation x protocol -> record (one CSV row) -> table and figure.

`workloads` names what is computed, `peers` who computes it, `timing` how it is timed, `records` how the result is
kept; `suites` runs them together, `ceilings` and `protocol_study` measure the machine and the timers themselves, and
`figures` draws from records alone.
"""
