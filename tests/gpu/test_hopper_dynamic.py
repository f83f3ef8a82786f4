"""The dynamic schedule of the Hopper decode kernel: ragged batches, clusters of every size, captured graphs."""

import random
from dataclasses import replace

import cases
import pytest
import torch

from hpcattn import attention_decode, attention_decode_reference, plan_decode, prepare_decode, relative_error
from hpcattn.bench.workloads import Workload
from hpcattn.schedule import CLUSTER_SIZES

SHAPES = cases.decode_grid(lengths=((1,),), rounds=3, kv_heads=(1, 3, 8))
LENGTHS = ((1, 63, 64, 65, 300, 500, 41), (4095, 3, 0, 1000), (127, 129, 256, 400, 222, 333), (9000, 700))
SETTINGS = (
    dict(cluster_size=1, num_clusters=9, row_blocks=2), dict(cluster_size=2, num_clusters=66, pair_cost=1),
    dict(cluster_size=4, num_clusters=5, min_quota=3), dict(cluster_size=8, num_clusters=15, pair_cost=2), {},
)  # fmt: skip


@pytest.fixture(autouse=True)
def hopper():
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("needs a Hopper GPU")


@pytest.mark.parametrize(("index", "workload"), [(i, w) for i, (w, *_) in enumerate(SHAPES)])
def test_decode(index, workload, device, coverage):
    """Every shape with four batches, cluster sizes and other settings in turn: 360 configurations."""
    for i, kv_lens in enumerate(LENGTHS):
        w = replace(workload, kv_lens=kv_lens, q_lens=(workload.q_lens[0],) * len(kv_lens), case=f"v_mean={i % 2}.0")
        settings = SETTINGS[(index + i) % len(SETTINGS)]
        error = cases.check_decode(cases.build(w, device), "hopper", "dynamic", None, settings)
        coverage(cases.describe(w, "dynamic"), "hopper", error)


@pytest.mark.parametrize("seed", range(100))
def test_random_ragged_batches(seed, device):
    """1 to 512 requests of 0 to 200,000 tokens, as far as 600,000 tokens in all reach."""
    rng = random.Random(seed)
    lens, room = [], 600_000
    for _ in range(int(2 ** rng.uniform(0, 9))):
        lens.append(min(room, int(10 ** rng.uniform(0, 5.3)) - 1))
        room -= lens[-1]
    rng.shuffle(lens)
    dtype, quant = rng.choice(cases.FORMATS)
    s, group = rng.randint(1, 5), rng.choice((1, 4, 8))
    w = Workload(
        suite="decode", case=f"v_mean={seed % 2}.0", q_lens=(s,) * len(lens), kv_lens=tuple(lens), dtype=dtype,
        quant=quant, num_q_heads=group, num_kv_heads=1, page_size=rng.choice((16, 64)),
    )  # fmt: skip
    cases.check_decode(
        cases.build(w, device), "hopper", "dynamic", None, rng.choice(SETTINGS) | dict(max_seq_len=2**18)
    )


@pytest.mark.parametrize("size", CLUSTER_SIZES)
def test_one_plan_gives_the_same_bits_whatever_the_workspace_holds(size, device):
    step = cases.decode_step(device) | dict(implementation="hopper")
    plan = plan_decode(step["seq_lens"], 2, cluster_size=size, num_clusters=7, min_quota=1)
    first = attention_decode(**step, plan=plan)
    workspace = torch.empty(2 * 7 * 16 * 130, device=device)
    call = prepare_decode(**step, plan=plan, workspace=workspace)
    for garbage in (torch.nan, torch.inf, -1e38, 0.0) * 10:
        workspace.fill_(garbage)
        assert torch.equal(call(), first) and not plan.counters.any()


def test_ten_thousand_replays_under_changing_lengths(device):
    """One captured graph builds the plan and decodes; every result is the one that the oracle has confirmed."""
    step = cases.decode_step(device) | dict(implementation="hopper")
    lens, out = step["seq_lens"], torch.empty_like(step["q"])
    plan = plan_decode(lens, 2, cluster_size=4, num_clusters=30, max_seq_len=4096)
    call = prepare_decode(**step, plan=plan, out=out)
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plan_decode(lens, 2, out=plan)
        call()
    reference = {k: v for k, v in step.items() if k != "implementation"}
    rng, confirmed = random.Random(0), []
    for _ in range(40):
        lens.copy_(torch.tensor([rng.randint(0, 700), rng.randint(0, 5), rng.randint(0, 4096)], dtype=torch.int32))
        graph.replay()
        assert relative_error(out, attention_decode_reference(**reference)[0]) < cases.BOUND["bf16"], lens
        confirmed.append((lens.clone(), out.clone()))
    wrong = torch.zeros((), dtype=torch.int64, device=device)
    for i in range(10_000):
        new, expected = confirmed[i * 7 % 40]
        lens.copy_(new)
        out.fill_(torch.nan)
        graph.replay()
        wrong += (out != expected).any()
    assert wrong == 0 and not plan.counters.any()


def test_two_streams_with_plans_of_their_own(device):
    step = cases.decode_step(device) | dict(implementation="hopper")
    plans = [plan_decode(step["seq_lens"], 2, cluster_size=c, num_clusters=9, min_quota=1) for c in (2, 4)]
    expected = [attention_decode(**step, plan=plan) for plan in plans]
    calls = [prepare_decode(**step, plan=plan) for plan in plans]
    streams = [torch.cuda.Stream(device) for _ in plans]
    torch.cuda.synchronize()
    for _ in range(200):
        for stream, call in zip(streams, calls, strict=True):
            with torch.cuda.stream(stream):
                call()
    torch.cuda.synchronize()
    assert all(torch.equal(call(), o) for call, o in zip(calls, expected, strict=True))
