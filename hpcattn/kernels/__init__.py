"""Attention kernels: `portable` runs on any GPU and, interpreted, on a CPU; `hopper` needs sm_90."""
