"""Lesson 06: the model adds up, the map is the library's, the merges are right under hostile schedules."""

import importlib.util
import math
import random
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from lesson_cases import cell_of, defined_in

from hpcattn import schedule
from hpcattn.bench import figures, records, timing
from hpcattn.bench.ceilings import Ceilings
from hpcattn.bench.workloads import DECODE_CASES
from hpcattn.emulator import BarrierMisuse, Deadlock, EmulatorError, UnwrittenRead
from hpcattn.lessons import exercise, split_k_kernels
from hpcattn.lessons import split_k as lab
from hpcattn.lessons.split_k import Merge, Piece, Rates, makespan, simulate
from hpcattn.reference import relative_error

NOTEBOOK = "06_split_k_dsm.ipynb"


# --- The exercises ----------------------------------------------------------------------------------------------------


def right_plan(tiles, clusters):
    return [[(s.pair, s.first, s.last) for s in segments] for segments in lab.task_map(tiles, clusters)]


def rounds_the_quota_down(tiles, clusters):
    return right_plan(tiles, clusters)[:-1] + [[]]


def whole_requests(tiles, clusters):
    return [[(pair, 0, n) for pair, n in enumerate(tiles) if pair % clusters == c] for c in range(clusters)]


def every_request_alike(tiles, clusters):
    """What a fixed split does: no chunk crosses a request's end."""
    plan = [[] for _ in range(clusters)]
    for pair, n in enumerate(tiles):
        size = math.ceil(n / clusters)
        for c, at in enumerate(range(0, n, size)):
            plan[c].append((pair, at, min(at + size, n)))
    return plan


def longest_first(tiles, clusters):
    order = sorted(range(len(tiles)), key=lambda pair: -tiles[pair])
    plan = right_plan([tiles[pair] for pair in order], clusters)
    return [[(order[pair], first, last) for pair, first, last in segments] for segments in plan]


def twice_at_the_border(tiles, clusters):
    plan = right_plan(tiles, clusters)
    pair, first, last = plan[1][0] if plan[1] else (0, 0, 1)
    return [plan[0], [(pair, max(0, first - 1), last), *plan[1][1:]], *plan[2:]]


def too_few_clusters(tiles, clusters):
    return right_plan(tiles, clusters)[: clusters - 1]


def idle_in_between(tiles, clusters):
    plan = right_plan(tiles, clusters)
    return [plan[-1], *plan[:-1]] if not plan[-1] else plan


def half_quota(tiles, clusters):
    return right_plan(tiles, max(1, clusters // 2)) + [[] for _ in range(clusters - max(1, clusters // 2))]


WRONG_PLANS = [
    rounds_the_quota_down, whole_requests, every_request_alike, longest_first, twice_at_the_border, too_few_clusters,
    idle_in_between, half_quota,
]  # fmt: skip


def test_the_stubs_are_not_attempted():
    assert exercise(lab.check_plan, defined_in(NOTEBOOK, "plan", accumulate=accumulate)).status == "not attempted"
    stub = defined_in(NOTEBOOK, "bytes_expected")
    assert exercise(lab.check_bytes_expected, stub).status == "not attempted"


def test_the_solutions_pass():
    assert exercise(lab.check_plan, defined_in(f"solutions/{NOTEBOOK}", "plan", accumulate=accumulate)).passed
    assert exercise(lab.check_bytes_expected, defined_in(f"solutions/{NOTEBOOK}", "bytes_expected")).passed
    assert exercise(lab.check_plan, right_plan).passed


@pytest.mark.parametrize("mutant", WRONG_PLANS)
def test_wrong_plans_fail_with_a_reason(mutant):
    result = exercise(lab.check_plan, mutant)
    assert result.status == "failed"
    assert "cluster" in result.message


@pytest.mark.parametrize(
    "mutant",
    [
        lambda cluster, rows, dims: rows * dims * 4,  # m and l forgotten
        lambda cluster, rows, dims: (cluster - 1) * (rows // cluster) * (dims + 2) * 4,  # nothing from itself
        lambda cluster, rows, dims: cluster * rows * (dims + 2) * 4,  # all rows of everybody
        lambda cluster, rows, dims: -1,
    ],
)
def test_wrong_byte_counts_fail_with_a_reason(mutant):
    result = exercise(lab.check_bytes_expected, mutant)
    assert result.status == "failed"
    assert "bytes" in result.message


# --- The model --------------------------------------------------------------------------------------------------------

RATES = Rates(total=1000.0, most=400.0, start_us=2.0, sms=4)
KB = 1000 / lab.TOKEN_BYTES  # tokens


def test_an_sm_takes_what_it_can_and_all_take_what_there_is():
    assert makespan(simulate([[Piece(0, 4000 * KB)]], RATES)) == pytest.approx(2 + 10)  # one: at most
    assert makespan(simulate([[Piece(0, 1000 * KB)]] * 4, RATES)) == pytest.approx(2 + 4)  # four: a quarter each
    # two waves, and the rest of a long one alone
    assert makespan(simulate([[Piece(0, 1000 * KB)]] * 8, RATES)) == pytest.approx(2 + 8)
    spans = simulate([[Piece(0, 2000 * KB)], *[[Piece(1, 500 * KB)]] * 3], RATES)
    assert makespan(spans) == pytest.approx(2 + 2 + 1500 / 400)


def test_only_the_last_merge_holds_anything_up():
    spans = simulate([[Piece(0, 400 * KB, 5.0), Piece(1, 400 * KB, 3.0)]], RATES)
    assert [t for s in spans if s.merges for t in (s.start, s.stop)] == pytest.approx([3, 8, 4, 7])
    assert [t for s in spans if not s.merges for t in (s.start, s.stop)] == pytest.approx([2, 3, 3, 4])
    spans = simulate([[Piece(0, 400 * KB, 5.0)]] * 4 + [[Piece(1, 400 * KB)]], RATES)  # a CTA waits for an SM
    assert makespan(spans) == pytest.approx(2 + 1.6 + 5 + 1)


def test_calibration_reads_back_what_the_model_was_given():
    for given in (Rates(4000.0, 50.0, 5.0), Rates(4000.0, 90.0, 3.0)):
        times = [makespan(simulate(lab.static_ctas((n,) * count, 1, 1), given)) for n, count in ((512, 64), (4096, 32))]
        found = lab.calibrate(4000.0, *times)
        assert (found.most, found.start_us) == pytest.approx((given.most, given.start_us))


def test_the_model_fits_the_records_as_the_text_says():
    decode, total = figures.recorded("decode"), Ceilings.load().tb_per_s * 1e3
    ours = lab.decode_us(decode, "hopper", "static")
    rates = lab.calibrate(total, ours["uniform_512"], ours["skewed_mix"])
    assert rates.most > 2 * total / lab.SMS
    for case in ("one_64k_7x4k", "one_64k_31x4k", "one_128k_31x4k"):
        modeled = makespan(simulate(lab.static_ctas(DECODE_CASES[case], 32, 512), rates))
        assert 1 < ours[case] - modeled < 5


def test_the_rule_of_our_static_schedule_is_the_library_s(monkeypatch):
    monkeypatch.setattr(schedule, "multiprocessors", lambda device: lab.SMS)
    names = {"lab": lab, "schedule": schedule}
    exec(cell_of(NOTEBOOK, "our_rule").partition("\n\n\n")[0], names)
    for lens in DECODE_CASES.values():
        assert names["our_rule"](lens) == schedule.static_splits(len(lens), max(lens), torch.device("cpu"))


# --- The task map -----------------------------------------------------------------------------------------------------


def random_lens(seed):
    deal = random.Random(seed)
    return [deal.choice((0, 1, 127, 128, 129, deal.randrange(5000))) for _ in range(deal.randrange(1, 40))]


@pytest.mark.parametrize("seed", range(6))
def test_the_map_is_the_library_s(seed):
    lens = random_lens(seed)
    for clusters, least in ((1, 1), (7, 1), (33, 1), (132, 2)):
        header, _, expected = schedule.plan_decode_reference(lens, 1, clusters, min_quota=least)
        tiles = lab.tiles_of(lens)
        share = max(least, math.ceil(sum(tiles) / clusters))
        assert share <= header[0] <= share + share // schedule.SPARE, "a little longer, if that spares a cut"
        mapped, at = lab.task_map(tiles, clusters, header[0]), 0
        for record, segments in zip(expected, mapped, strict=True):
            n = sum(s.last - s.first for s in segments)
            start = [segments[0].pair, 0, segments[0].first, segments[0].tiles] if segments else [0] * 4
            assert record == [*start, at, at + n, header[0], 0] and n <= header[0]
            at += n


@pytest.mark.parametrize("size", lab.CLUSTERS)
def test_shares_are_those_of_the_library(size):
    lens, clusters = random_lens(11), 5
    seq_lens = torch.tensor(lens, dtype=torch.int32)
    plan = schedule.plan_decode(seq_lens, 1, cluster_size=size, num_clusters=clusters, min_quota=1, pair_cost=0)
    starts, at, quota = [[] for _ in lens], 0, int(plan.header[0])
    for segments in lab.task_map(lab.tiles_of(lens), clusters, quota):
        ctas = lab.shares(segments, size, at, quota)
        assert sum(s.last - s.first for mine in ctas for s in mine) == sum(s.last - s.first for s in segments)
        for segment in (s for mine in ctas for s in mine):
            starts[segment.pair] += [segment.first * lab.TILE] * (segment.first < segment.last)
        at += sum(s.last - s.first for s in segments)
    assert [[sorted(found)] for found in starts] == schedule.plan_chunks(plan)


def test_pieces_hold_every_token_once():
    for size in lab.CLUSTERS:
        ctas = lab.dynamic_ctas(DECODE_CASES["one_64k_31x4k"], size, 1.0, 2.0)
        assert len(ctas) == size * lab.resident_clusters(size)
        tokens = [0] * 32
        for piece in (p for pieces in ctas for p in pieces):
            tokens[piece.request] += piece.tokens
        assert tuple(tokens) == DECODE_CASES["one_64k_31x4k"]


def test_states_are_counted_as_the_text_says():
    mapped = lab.task_map([8, 1, 3, 1, 6], 4)
    assert lab.cut_states(mapped) == 6  # pairs 0, 2 and 4, each in two clusters
    assert lab.cut_states(lab.task_map(lab.tiles_of(DECODE_CASES["uniform_4096"]), 32)) == 0


# --- The merges -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cluster", [2, 4, 8])
@pytest.mark.parametrize("kind", ["separate", "arrive", "push"])
def test_merges_are_right_under_every_kind_of_schedule(kind, cluster):
    call = Merge(kind, cluster, 2)
    call.states[call.ctas * lab.ROWS * lab.HEAD_DIM :].view(call.ctas, 2, lab.ROWS)[1] = torch.tensor(
        [[-math.inf], [0.0]]
    )  # an empty state
    for seed in range(4):
        assert call.error(seed) < lab.BF16_BOUND
    assert not call.arrivals.any()


def test_without_a_merge_every_state_is_written():
    assert Merge("alone", 1, 3).error() < lab.BF16_BOUND


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"WAIT": False}, UnwrittenRead),
        ({"MEET": False}, BarrierMisuse),
        ({"BYTES": lab.STATE_BYTES + 16}, Deadlock),
        ({"BYTES": lab.STATE_BYTES - 64}, Deadlock),
    ],
)
def test_mistakes_in_the_protocol_are_caught(options, error):
    caught = []
    for seed in range(4):
        try:
            Merge("push", 4, 1)(seed, **options)
        except EmulatorError as found:
            caught.append(type(found))
    assert caught and set(caught) == {error}


def altered(tmp_path, old, new):
    """The kernels with one piece of their text replaced."""
    source = Path(split_k_kernels.__file__).read_text()
    assert source.count(old) == 1, old
    path = tmp_path / "altered_kernels.py"
    path.write_text(source.replace(old, new))
    spec = importlib.util.spec_from_file_location("altered_kernels", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("kind", "old", "new"),
    [
        ("push", "slot = rank * ROWS + row % ROWS", "slot = row"),  # all senders into one slot
        ("push", "gl.exp2(m - gl.where", "gl.exp2(0 * m - gl.where"),  # weights that are all alike
        ("arrive", "if before == C - 1:", "if before == C - 2:"),  # the last but one
        ("arrive", "        gl.store(arrivals + pair, 0)\n", ""),  # a counter that is not set back
    ],
)
def test_mistakes_in_the_merges_are_caught(kind, old, new, tmp_path, monkeypatch):
    monkeypatch.setattr(lab, "kernels", altered(tmp_path, old, new))
    call, caught = Merge(kind, 4, 2), 0
    for seed in (0, 1):
        try:
            caught += not call.error(seed) < lab.BF16_BOUND
        except EmulatorError:
            caught += 1
    assert caught


@pytest.mark.parametrize("level", lab.LEVELS)
def test_numbers_travel(level):
    lab._check_chain(level, 5, "cpu")
    for seed in range(1, 4):
        assert torch.equal(lab.chain(level, 3)(seed), lab.chain(level, 3)(0))


def test_sass_says_what_the_text_says():
    call = Merge("push", 4, 1)
    options = call.shape | {"C": 4, "BYTES": lab.STATE_BYTES}
    push = lab.compiled(split_k_kernels.push_kernel, call.states, call.out, **options)
    opcodes = push.opcodes
    assert (opcodes["STAS.128"], opcodes["STAS"], opcodes["UCGABAR_ARV"], opcodes["UCGABAR_WAIT"]) == (2, 4, 1, 1)
    assert "reqnctapercluster" not in push.ptx  # a matter of the launch
    meets = push.sass.index("UCGABAR_WAIT")
    assert meets < push.sass.index("LDG") and meets < push.sass.index("STAS")
    options = call.shape | {"C": 4}
    args = (call.states, call.workspace, call.arrivals, call.out)
    arrive = lab.compiled(split_k_kernels.arrive_kernel, *args, **options)
    assert arrive.opcodes["MEMBAR.ALL.GPU"] and arrive.opcodes["CCTL.IVALL"] and not arrive.opcodes["STAS"]
    held = lab.compiled(split_k_kernels.occupy_kernel, torch.empty(32), lab.OCCUPY_CLOCKS, num_warps=1)
    assert held.shared_bytes > 228 * 1024 // 2  # one CTA per SM
    assert all(kernel.spill_store_bytes == 0 for kernel in (push, arrive, held))


# --- Measurements -----------------------------------------------------------------------------------------------------


def test_record_checks_times_and_appends(tmp_path, monkeypatch):
    monkeypatch.setattr(timing, "MIN_CALLS", 1)
    path = tmp_path / "lessons.csv"
    options = {"cluster_sizes": (1, 2), "merge_ctas": 2, "occupied": {}, "replays": 1, "warmup": 0}
    steps = dict.fromkeys(lab.LEVELS, 2)
    lab.record(path, commit="abc", device="cpu", cases={"tiny": (130, 3)}, chain_steps=steps, **options)
    frame = records.load(path)
    names = {"alone", "separate_2", "merge_2", "arrive_2", "push_2", "cluster1_tiny", "cluster2_tiny"}
    names |= {f"chain_{level}_2" for level in lab.LEVELS}
    assert set(lab.recorded(path)) == names and len(frame) == len(names)
    assert set(frame.commit) == {"abc"} and (frame.median_us > 0).all()
    assert (frame.rel_error.dropna() < lab.BF16_BOUND).all() and frame.rel_error.notna().sum() == 7


def test_occupancy_is_timed_by_size_and_number(monkeypatch):
    seen = []
    monkeypatch.setattr(lab, "_timed", lambda calls, *_: {n: SimpleNamespace(**TIMING) for n in calls})
    monkeypatch.setattr(lab, "run", lambda kernel, ctas, *args, **options: seen.append((ctas, options["cluster"])))
    found = [row["case"] for row in lab._measure_occupancy({2: (3,), 4: (1, 2)}, device="cpu", replays=1, warmup=0)]
    assert found == ["splitk_occupy_2_3", "splitk_occupy_4_1", "splitk_occupy_4_2"]
    lab.occupy(4, 2, 10, "cpu")()
    assert seen == [(8, 4)]


TIMING = {"median_us": 1.0, "p10_us": 1.0, "p90_us": 1.0, "floor_us": 0.5, "sm_clock_mhz": 1980.0}


def test_a_wrong_kernel_is_not_timed(monkeypatch):
    monkeypatch.setattr(lab, "relative_error", lambda got, want: float("nan"))
    monkeypatch.setattr(lab, "measure", lambda *args, **kwargs: pytest.fail("timed"))
    with pytest.raises(AssertionError, match="relative error"):
        lab.measure_all("cpu", cases={}, cluster_sizes=(1, 2), merge_ctas=2)


def test_nothing_recorded_is_no_error(tmp_path):
    assert lab.recorded(tmp_path / "none.csv") == {}


def test_the_library_s_kernel_takes_every_cluster_size():
    x = lab.workload((300, 0, 1)).build()
    want = x.reference()[0]
    for size in (1, 8):
        assert relative_error(lab.decode_call(x, size, num_clusters=2)(), want) < lab.BF16_BOUND


def test_the_records_bear_out_the_text():
    rows = lab.recorded()
    if not rows:
        pytest.skip("not recorded yet")
    us = {name: row.median_us for name, row in rows.items()}
    for c in (2, 4, 8):
        assert us["alone"] < us[f"push_{c}"] < us[f"separate_{c}"]
        held = us[f"occupy_{c}_{lab.resident_clusters(c)}"]
        assert held < 1.5 * lab.OCCUPY_CLOCKS / 1e3 / figures.SM_CLOCK_GHZ
    steps = [
        (us[f"chain_{level}_{n}"] - rows[f"chain_{level}_{n}"].floor_us) / n for level, n in lab.CHAIN_STEPS.items()
    ]
    assert steps == sorted(steps)  # the farther, the more expensive
