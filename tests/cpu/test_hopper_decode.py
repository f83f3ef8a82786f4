"""The Hopper decode kernel: executed in the emulator on tiny shapes, and what its machine code must look like."""

import math
import re
from dataclasses import replace

import cases
import pytest
import torch

from hpcattn import PagedKVCache, attention_decode, decode_workspace, emulator, explain, prepare_decode
from hpcattn.bench.workloads import Workload
from hpcattn.cache import flatten_scales
from hpcattn.inspection import variants
from hpcattn.kernels.hopper import decode as hopper
from hpcattn.kernels.hopper.launch import matrix_view
from hpcattn.schedule import LONG_REQUEST, SHORTEST_CHUNK, static_splits

GRID = cases.decode_grid(lengths=((1, 70), (0, 330, 3), (255, 256, 257), (2, 700)))


@pytest.mark.parametrize(("workload", "_", "splits"), GRID)
def test_decode(workload, _, splits, coverage):
    error = cases.check_decode(cases.build(workload, "cpu"), "hopper", "static", splits)
    coverage(cases.describe(workload, "static"), "hopper", error)


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
    call = (inputs.q, inputs.cache.k, inputs.cache.v, inputs.block_table, inputs.seq_lens, *scales, 5, 128**-0.5, 3, 1)
    for step in hopper.launches(*call, workspace, out, None):
        emulator.launch(step.kernel, step.grid, *step.args, schedule_seed=seed, **step.options)
    assert torch.equal(out, expected)


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
    call = (*tensors, *[None] * 6, 5, 128**-0.5, 2, 1, "hopper", None, torch.empty_like(inputs.q), None)
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


@pytest.mark.parametrize("sizes", [(1, 512), (64, 512), (64, 4096), (32, 65536), (4096, 131072), (8, 0)])
def test_static_splits(sizes, monkeypatch):
    """Half the multiprocessors are enough; ragged batches get more; few waves; no short chunks."""
    ctas, longest = sizes
    monkeypatch.setattr("hpcattn.schedule.multiprocessors", lambda device: 132)
    splits, shortest = static_splits(ctas, longest, torch.device("cpu"))
    assert shortest == SHORTEST_CHUNK and 1 <= splits <= max(1, longest // shortest)
    assert splits == 1 or ctas * splits <= 16 * 132
    if longest <= LONG_REQUEST:
        assert splits == 1 or ctas * splits <= 66


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
    product = ".MT88.4" if fp8 else "tnspA"
    loops = [b for b in blocks(compiled.sass) if "WARPGROUP.DEPBAR" in b and product in b]
    assert loops
    for loop in loops:
        assert "LDS.U8" not in loop and not re.search(r"\bSTS\.(64|128)", loop), "V is consumed where TMA put it"
        if fp8:
            assert loop.count(".MT88.4") == tile * head_dim // (4 * 4 * 128), "ldmatrix.trans, four registers each"
            assert len(re.findall(r"\bPRMT\b", loop)) >= tile * head_dim // (4 * 128), "one per register"
