"""The Hopper decode kernel: executed in the emulator on tiny shapes, and what its machine code must look like."""

import math
import re
from dataclasses import replace
from types import SimpleNamespace

import cases
import pytest
import torch

from hpcattn import (
    PagedKVCache,
    attention_decode,
    attention_decode_reference,
    decode_workspace,
    emulator,
    explain,
    plan_decode,
    prepare_decode,
)
from hpcattn.bench.workloads import Workload
from hpcattn.cache import flatten_scales
from hpcattn.inspection import variants
from hpcattn.kernels.hopper import decode_launch as hopper
from hpcattn.kernels.hopper.launch import Bound, matrix_view
from hpcattn.quantization import FP8
from hpcattn.schedule import LONG_REQUEST, SHORTEST_CHUNK, PlanTensors, static_splits

LENGTHS = ((1, 70), (0, 330, 3), (255, 256, 257), (2, 700))
GRID = cases.decode_grid(lengths=LENGTHS)
SETTINGS = (
    dict(cluster_size=1, num_clusters=3, min_quota=1, pair_cost=1), dict(cluster_size=2, num_clusters=2, min_quota=2),
    dict(cluster_size=4, num_clusters=1, pair_cost=2), dict(cluster_size=8, num_clusters=2, min_quota=1, pair_cost=0),
    dict(cluster_size=1, num_clusters=5, min_quota=1, pair_cost=0), dict(cluster_size=4, num_clusters=3, min_quota=1),
    dict(cluster_size=2, num_clusters=7, min_quota=1, pair_cost=5),
)  # fmt: skip


@pytest.mark.parametrize(("workload", "_", "splits"), GRID)
def test_decode(workload, _, splits, coverage):
    error = cases.check_decode(cases.build(workload, "cpu"), "hopper", "static", splits)
    coverage(cases.describe(workload, "static"), "hopper", error)


@pytest.mark.parametrize(("index", "workload"), [(i, w) for i, (w, *_) in enumerate(GRID) if (i + i // 10) % 2])
def test_dynamic_decode(index, workload, coverage):
    """Every other shape, each layout and page size in some format, with the settings of a plan in turn."""
    rows = workload.num_query_tokens * workload.num_q_heads // workload.num_kv_heads
    least = -(-rows // 32)
    settings = SETTINGS[index % len(SETTINGS)] | dict(row_blocks=max(least, 1 + index % 3 // 2), query_rows=rows)
    error = cases.check_decode(cases.build(workload, "cpu"), "hopper", "dynamic", None, settings)
    coverage(cases.describe(workload, "dynamic"), "hopper", error)


RAGGED = Workload(
    suite="decode",
    case="v_mean=1.0",
    q_lens=(5, 5, 5),
    kv_lens=(3, 0, 389),
    num_q_heads=8,
    num_kv_heads=1,
    page_size=32,
)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(("dtype", "quant"), cases.FORMATS)
def test_every_schedule_of_warps_gives_the_same_bits(dtype, quant, seed):
    """Hostile orders of warps and copies; whatever a merge reads without having been written is NaN."""
    inputs = cases.build(replace(RAGGED, dtype=dtype, quant=quant), "cpu")
    expected = cases.run_hopper(inputs, num_splits=3)
    out, workspace = torch.full_like(expected, math.nan), torch.full((3 * 3 * 40 * 130,), math.nan)
    scales = flatten_scales(inputs.cache, inputs.scales)
    call = (
        inputs.q,
        inputs.cache.k,
        inputs.cache.v,
        inputs.block_table,
        inputs.seq_lens,
        *scales,
        None,
        5,
        128**-0.5,
        3,
        1,
    )
    for step in hopper.launches(*call, workspace, out, None):
        emulator.launch(step.kernel, step.grid, *step.args, schedule_seed=seed, **step.options)
    assert torch.equal(out, expected)


def planned_launch(inputs, out, **settings):
    """(the one launch of a planned call, its plan); whatever it reads without having written it is NaN."""
    w = inputs.workload
    plan = plan_decode(inputs.seq_lens, w.num_kv_heads, **settings)
    scales = flatten_scales(inputs.cache, inputs.scales)
    workspace = torch.full((2 * plan.num_clusters * w.num_query_tokens * 8 * 130,), math.nan)
    (step,) = hopper.launches(
        inputs.q, inputs.cache.k, inputs.cache.v, inputs.block_table, inputs.seq_lens, *scales,
        PlanTensors(*plan.tensors, plan.cluster_size, plan.row_blocks), w.num_query_tokens, 128**-0.5, 1, 1,
        workspace, out, None,
    )  # fmt: skip
    return step, plan


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize(("dtype", "quant"), cases.FORMATS)
def test_every_schedule_of_warps_and_clusters_gives_the_same_bits(dtype, quant, size):
    """Of a plan that cuts the long pair, shares it out and leaves short ones to one CTA."""
    short = dict(q_lens=(2,) * 3, kv_lens=(3, 0, 300), page_size=64)
    inputs = cases.build(replace(RAGGED, **short, dtype=dtype, quant=quant), "cpu")
    settings = dict(cluster_size=size, num_clusters=3, min_quota=1, pair_cost=0, query_rows=16)
    expected = cases.run_hopper(inputs, plan=plan_decode(inputs.seq_lens, 1, **settings))
    assert cases.relative_error(expected, inputs.reference()[0]) < (4e-3 if dtype == "bf16" else 5e-2)
    for seed in range(4):
        out = torch.full_like(expected, math.nan)
        step, plan = planned_launch(inputs, out, **settings)
        assert step.cluster == size
        emulator.launch(step.kernel, step.grid, *step.args, schedule_seed=seed, cluster=size, **step.options)
        assert torch.equal(out, expected) and not plan.counters.any()


@pytest.mark.parametrize("size", [1, 4])
def test_what_a_workspace_holds_makes_no_difference(size):
    inputs = cases.build(replace(RAGGED, q_lens=(1,) * 3), "cpu")
    plan = plan_decode(inputs.seq_lens, 1, cluster_size=size, num_clusters=4, min_quota=1, pair_cost=0)
    args = (inputs.q, inputs.cache, inputs.block_table, inputs.seq_lens)
    workspace = decode_workspace(*args, plan=plan, implementation="hopper")
    results = []
    for garbage in (math.nan, -1e38):
        workspace.fill_(garbage)
        call = dict(plan=plan, workspace=workspace, implementation="hopper")
        results.append(attention_decode(*args, **call))
        results.append(attention_decode(*args, **call))  # as the last call left it
        assert not plan.counters.any()
    assert all(torch.equal(o, results[0]) for o in results)
    assert cases.relative_error(results[0], inputs.reference()[0]) < cases.BOUND["bf16"]


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("num_clusters", [1, 4])
def test_a_plan_for_other_lengths_gives_nan_rows_only_there(size, num_clusters):
    """Longer or shorter than planned, whether cut between clusters or not, and beyond the table."""
    inputs = cases.build(replace(RAGGED, q_lens=(1,) * 4, kv_lens=(300, 130, 389, 70)), "cpu")
    lens = torch.tensor([301, 120, 100, 70], dtype=torch.int32)  # 3, 1, 1 and 1 tiles instead of 3, 2, 4 and 1
    plan = plan_decode(lens, 1, cluster_size=size, num_clusters=num_clusters, min_quota=1, pair_cost=0)
    o = cases.run_hopper(inputs, plan=plan)
    assert o.isnan().flatten(1).all(1).tolist() == [False, True, True, False] and not plan.counters.any()
    right = [0, 3]
    assert cases.relative_error(o[right], inputs.reference()[0][right]) < cases.BOUND["bf16"]
    inputs.seq_lens[3] = 9999
    plan = plan_decode(inputs.seq_lens, 1, cluster_size=size, num_clusters=num_clusters, min_quota=1, max_seq_len=512)
    o = cases.run_hopper(inputs, plan=plan)
    assert o.isnan().flatten(1).all(1).tolist() == [False] * 3 + [True] and not plan.counters.any()


@pytest.mark.parametrize(("size", "num_clusters", "cost"), [(1, 9, 0), (2, 9, 2), (4, 4, 8), (8, 3, 0)])
def test_a_pair_cut_over_many_clusters(size, num_clusters, cost):
    """Some clusters may have none of its tiles (the first, all in the price of beginning), or fewer than CTAs."""
    inputs = cases.build(replace(RAGGED, q_lens=(1,) * 2, kv_lens=(800, 7), page_size=64), "cpu")
    plan = plan_decode(inputs.seq_lens, 1, cluster_size=size, num_clusters=num_clusters, min_quota=1, pair_cost=cost)
    touched = [r for r in plan.records.tolist() if r[0] == 0 and r[4] < r[5]]
    assert len(touched) >= min(num_clusters - 1, 3)
    o = cases.run_hopper(inputs, plan=plan)
    assert cases.relative_error(o, reference(inputs)) < cases.BOUND["bf16"] and not plan.counters.any()


def test_prepared_call_with_a_plan_follows_its_rebuilding():
    inputs = cases.build(replace(RAGGED, q_lens=(1,) * 3), "cpu")
    plan = plan_decode(inputs.seq_lens, 1, cluster_size=2, num_clusters=2, min_quota=1)
    args = (inputs.q, inputs.cache, inputs.block_table, inputs.seq_lens)
    call = prepare_decode(*args, plan=plan, implementation="hopper")
    call()
    for lens in ((389, 1, 0), (0, 130, 300)):  # table rows that the build left without pages list others' or none
        inputs.seq_lens.copy_(torch.tensor(lens, dtype=torch.int32).clamp_max(torch.tensor(inputs.workload.kv_lens)))
        plan_decode(inputs.seq_lens, 1, out=plan)
        o = call().clone()
        assert cases.relative_error(o, reference(inputs)) < cases.BOUND["bf16"] and not plan.counters.any()


def reference(inputs):
    return attention_decode_reference(inputs.q, inputs.cache, inputs.block_table, inputs.seq_lens)[0]


def test_where_every_pair_has_a_cta_a_plan_is_not_walked():
    inputs = cases.build(replace(RAGGED, q_lens=(1,) * 3, kv_lens=(3, 0, 300)), "cpu")
    settings = dict(cluster_size=1, num_clusters=3, min_quota=4, max_seq_len=512)
    plan = plan_decode(inputs.seq_lens, 1, **settings)
    assert plan.one_cta_per_pair
    assert torch.equal(cases.run_hopper(inputs, plan=plan), cases.run_hopper(inputs, num_splits=1))


def test_prepared_call_reads_its_tensors_anew():
    inputs = cases.build(replace(RAGGED, kv_lens=(70, 9, 64)), "cpu")
    args = (inputs.q, inputs.cache, inputs.block_table, inputs.seq_lens)
    call = prepare_decode(*args, num_query_tokens=5, implementation="hopper", return_lse=True)
    first, lse = (x.clone() for x in call())
    assert torch.equal(first, cases.run_hopper(inputs)) and lse.isfinite().sum() == lse.numel()
    inputs.q.neg_()
    again, _ = call()
    assert torch.equal(again, cases.run_hopper(inputs)) and not torch.equal(again, first)


def test_buffers_and_workspace():
    inputs = cases.build(RAGGED, "cpu")
    args = (inputs.q, inputs.cache, inputs.block_table, inputs.seq_lens)
    common = dict(num_query_tokens=5, num_splits=2, implementation="hopper")
    out, workspace = torch.empty_like(inputs.q), decode_workspace(*args, **common)
    assert attention_decode(*args, **common, out=out, workspace=workspace) is out
    with pytest.raises(ValueError, match="workspace"):
        attention_decode(*args, **common, out=out, workspace=workspace[1:])


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_and_opcheck(dynamic):
    inputs = cases.build(replace(RAGGED, kv_lens=(70, 9, 64)), "cpu")
    tensors = (inputs.q, inputs.cache.k, inputs.cache.v, inputs.block_table, inputs.seq_lens)
    call = (*tensors, *[None] * 7, 1, 1, 5, 128**-0.5, 2, 1, "hopper", None, torch.empty_like(inputs.q), None)
    torch.library.opcheck(torch.ops.hpcattn.decode.default, call, test_utils=("test_schema", "test_faketensor"))

    def model(q, k, v, table, lens):
        cache = PagedKVCache(k, v)
        return attention_decode(q * 2, cache, table, lens, num_query_tokens=5, implementation="hopper") + 1

    compiled = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    assert torch.equal(compiled(*tensors), model(*tensors))


def test_a_call_that_passed_is_still_checked_when_something_changes():
    inputs = cases.build(RAGGED, "cpu")
    args = (inputs.q, inputs.cache, inputs.block_table, inputs.seq_lens)
    attention_decode(*args, num_query_tokens=5)
    attention_decode(*args, num_query_tokens=5)
    with pytest.raises(ValueError, match="q must"):
        attention_decode(*args, num_query_tokens=4)
    with pytest.raises(TypeError, match="out"):
        attention_decode(*args, num_query_tokens=5, out=inputs.q.float())
    with pytest.raises(ValueError, match="schedule"):
        attention_decode(*args, num_query_tokens=5, schedule="fast")


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("joint", [False, True])
@pytest.mark.parametrize("heads", [1, 3])
def test_matrix_view_counts_every_element(layout, joint, heads):
    cache = hopper_cache(layout, joint, heads)
    for x in (cache.k, cache.v):
        rows, columns, (page_rows, head_rows, head_columns) = matrix_view(x)
        matrix = x.as_strided((rows, columns), (x.stride(1), 1))
        for page, head, token in ((0, 0, 0), (4, heads - 1, 31), (2, heads // 2, 7)):
            row = page * page_rows + head * head_rows + token
            assert torch.equal(matrix[row, head * head_columns :][:64], x[page, token, head])


def hopper_cache(layout, joint, heads):
    cache = PagedKVCache.allocate(5, 32, heads, 64, layout=layout, joint=joint)
    cache.k.copy_(torch.randn(cache.k.shape)), cache.v.copy_(torch.randn(cache.v.shape))
    return cache


@pytest.mark.parametrize(
    ("ctas", "longest", "expected"),
    [
        (1, 512, 1), (1, 4096, 8), (8, 4096, 8), (32, 4096, 2), (64, 4096, 1),  # half the multiprocessors are enough
        (8, 65536, 32), (32, 65536, 32), (32, 131072, 32), (16, 16384, 32), (1, 8192, 16),  # lengths may differ much
        (100, 131072, 21), (4096, 131072, 1), (8, 0, 1),
    ],
)  # fmt: skip
def test_static_splits(ctas, longest, expected, monkeypatch):
    monkeypatch.setattr("hpcattn.schedule.multiprocessors", lambda device: 132)
    assert static_splits(ctas, longest, torch.device("cpu")) == (expected, SHORTEST_CHUNK)


@pytest.mark.parametrize(
    ("dtype", "head_dim", "rows", "pairs", "longest", "expected"),
    [
        (torch.bfloat16, 128, 8, 64, 4096, (8, 1, 128, 4)),
        (torch.bfloat16, 64, 1, 64, 4096, (8, 1, 128, 8)),
        (torch.bfloat16, 128, 16, 64, 4096, (8, 2, 128, 4)),  # two CTAs share the rows where SMs would idle
        (torch.bfloat16, 128, 16, 64, 8192, (16, 1, 128, 4)),
        (torch.bfloat16, 128, 16, 67, 4096, (16, 1, 128, 4)),
        (torch.bfloat16, 128, 24, 100, 4096, (32, 1, 128, 4)),
        (torch.bfloat16, 128, 40, 100, 4096, (32, 2, 128, 4)),
        (torch.bfloat16, 128, 80, 8, 4096, (32, 3, 128, 4)),
        (FP8, 128, 8, 64, 4096, (8, 1, 256, 4)),
        (FP8, 128, 32, 64, 4096, (16, 2, 256, 4)),
        (FP8, 128, 32, 100, 4096, (32, 1, 128, 8)),
    ],
)
def test_configuration(dtype, head_dim, rows, pairs, longest, expected):
    assert hopper.configuration(dtype, head_dim, 64, rows, pairs, longest, 132, None) == expected


@pytest.mark.parametrize(
    ("dtype", "page_size", "rows", "row_blocks", "expected"),
    [
        (torch.bfloat16, 64, 8, 1, (8, 1, 128, 4)),
        (torch.bfloat16, 64, 32, 1, (32, 1, 128, 4)),
        (torch.bfloat16, 64, 32, 2, (16, 2, 128, 4)),
        (torch.bfloat16, 64, 32, 3, (16, 2, 128, 4)),  # a power of two
        (torch.bfloat16, 64, 80, 3, (32, 3, 128, 4)),
        (FP8, 128, 8, 1, (8, 1, 256, 4)),
        (FP8, 256, 8, 1, (8, 1, 128, 8)),  # a share may begin in the middle of a page
        (FP8, 64, 32, 1, (32, 1, 128, 8)),
    ],
)
def test_configuration_of_a_plan(dtype, page_size, rows, row_blocks, expected):
    assert hopper.configuration(dtype, 128, page_size, rows, 1, 4096, 132, row_blocks) == expected


@pytest.mark.parametrize(("dtype", "quant"), cases.FORMATS)
def test_the_splits_that_the_operator_chooses(dtype, quant):
    """A table with room for long requests: many chunks for the longest, few for the others, most CTAs idle."""
    w = replace(RAGGED, q_lens=(1,) * 3, kv_lens=(LONG_REQUEST + 90, 1200, 3), page_size=256, dtype=dtype, quant=quant)
    inputs = cases.build(w, "cpu")
    args = (inputs.q, inputs.cache, inputs.block_table, inputs.seq_lens)
    chosen = explain(attention_decode, *args, scales=inputs.scales, implementation="hopper")
    assert chosen["num_splits"] >= 8 and chosen["min_tiles"] > 1
    cases.check_decode(inputs, "hopper", "static", None)


def test_a_cached_launch_keeps_no_cache_alive(monkeypatch):
    """What is kept of a descriptor is its form; stand-ins take the driver's place."""
    inputs = cases.build(RAGGED, "cpu")
    call = (inputs.q, inputs.cache.k, inputs.cache.v, inputs.block_table, inputs.seq_lens, None, None, None, None)
    (launch,) = hopper.launches(*call, 5, 1.0, 1, 1, None, inputs.q, None)
    compiled = SimpleNamespace(
        run=SimpleNamespace(
            global_scratch_size=0, profile_scratch_size=0, gsan_enabled=False, launch_cooperative_grid=False,
            launch_pdl=False, arg_annotations=None, kernel_signature=None,
        ),
        function=0, packed_metadata=(8, 1, 0), metadata=SimpleNamespace(tensordesc_meta=[{}, {}]),
    )  # fmt: skip
    monkeypatch.setattr("hpcattn.kernels.hopper.launch.driver", SimpleNamespace(
        active=SimpleNamespace(utils=SimpleNamespace(launch=None), get_current_stream=None)))  # fmt: skip
    encoded = []

    def encode(descriptor, meta, _):
        encoded.append(descriptor.base.data_ptr())
        return [encoded[-1], 1, 2, 3, 4]

    monkeypatch.setattr("hpcattn.kernels.hopper.launch.make_tensordesc_arg", encode)
    kernel = SimpleNamespace(warmup=lambda *a, **k: compiled, arg_names=launch.kernel.arg_names)
    bound = Bound(replace(launch, kernel=kernel))
    other = torch.zeros_like(inputs.cache.k)
    tensors = (inputs.q, inputs.block_table, inputs.seq_lens, inputs.q)
    arguments = bound.arguments(tensors, (other, inputs.cache.v))
    assert arguments[0] == other.data_ptr() and arguments[5] == inputs.cache.v.data_ptr()
    assert len(encoded) == 4 and bound.arguments(tensors, (other, inputs.cache.v)) == arguments and len(encoded) == 4
    with pytest.raises(ValueError, match="longer"):
        bound.arguments((*tensors, other), (other, inputs.cache.v))
    assert all(d.base.numel() == 0 for _, d in bound._descriptors)


def test_caches_that_tma_cannot_read_are_told_apart():
    odd = torch.zeros(2 * 32 * 64 + 1, dtype=torch.bfloat16)[1:].view(2, 32, 1, 64)
    assert "16 bytes" in hopper.unsupported(odd, odd, None)
    assert "no pages" in hopper.unsupported(odd[:0], odd[:0], None)
    assert hopper.unsupported(odd.clone(), odd.clone(), None) is None


def test_prepared_dynamic_call_needs_a_plan():
    inputs = cases.build(RAGGED, "cpu")
    args = (inputs.q, inputs.cache, inputs.block_table, inputs.seq_lens)
    with pytest.raises(ValueError, match="plan must be given"):
        prepare_decode(*args, num_query_tokens=5, schedule="dynamic")


def test_explained():
    inputs = cases.build(RAGGED, "cpu")
    args = (inputs.q, inputs.cache, inputs.block_table, inputs.seq_lens)
    text = str(explain(attention_decode, *args, num_query_tokens=5, implementation="hopper"))
    assert "implementation = hopper" in text and "num_splits" in text and "min_tiles" in text


def blocks(sass: str) -> list[str]:
    """Straight-line stretches of machine code."""
    return re.split(r"\n(?=\w+:$)|(?<=\bBRA)[^\n]*\n", sass, flags=re.M)


@pytest.mark.parametrize("variant", variants("hopper", "decode_kernel"), ids=lambda v: v.name)
def test_machine_code(variant):
    """Small-M products, V never stored again, no byte loads, TMA, a producer that gives its registers away."""
    c = variant.constexprs
    n, tile, head_dim, fp8 = (c[(variant.fn.arg_names.index(name),)] for name in ("N", "TILE", "D", "QUANT"))
    fp8 = fp8 != "none"
    compiled = variant.compile()
    family = "QGMMA" if fp8 else "HGMMA"
    products = {op for op in compiled.opcodes if op.startswith(("HGMMA", "QGMMA"))}
    assert {op.split(".")[1] for op in products} == {f"64x{n}x{32 if fp8 else 16}"} and products == {
        op for op in products if op.startswith(family)
    }
    assert compiled.families()["UTMALDG"] >= 2 and "USETMAXREG" in compiled.families()
    assert "STL" not in compiled.families()
    in_cluster = c[(variant.fn.arg_names.index("C"),)] > 1
    for word in ("STAS", "UCGABAR_ARV", "UCGABAR_WAIT"):
        assert (word in compiled.sass) == in_cluster
    assert ("mapa" in compiled.ptx) == in_cluster and compiled.num_warps == (12 if in_cluster else 8)
    assert "reqnctapercluster" not in compiled.ptx  # a matter of the launch
    product = ".MT88.4" if fp8 else "tnspA"
    loops = [b for b in blocks(compiled.sass) if "WARPGROUP.DEPBAR" in b and product in b]
    assert loops
    for loop in loops:
        assert "LDS.U8" not in loop and not re.search(r"\bSTS\.(64|128)", loop), "V is consumed where TMA put it"
        if fp8:
            assert loop.count(".MT88.4") == tile * head_dim // (4 * 4 * 128), "ldmatrix.trans, four registers each"
            assert len(re.findall(r"\bPRMT\b", loop)) >= tile * head_dim // (4 * 128), "one per register"
