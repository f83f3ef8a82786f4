"""Every operator and implementation against the oracle, on a CPU: the portable kernels run interpreted."""

import math
from dataclasses import replace

import cases
import pytest
import torch

from hpcattn import (
    PackedKV,
    PagedKVCache,
    append_tokens,
    attention_decode,
    attention_prefill,
    attention_prefill_reference,
    decode,
    decode_workspace,
    explain,
    plan_decode,
    prepare_decode,
    relative_error,
)
from hpcattn.bench.workloads import Workload
from hpcattn.quantization import pad_q_scale
from hpcattn.schedule import ROW_BLOCKS

DECODE = cases.decode_grid(lengths=((1, 70), (0, 130, 3), (63, 64, 65), (2, 257)))
PREFILL = cases.prefill_grid(
    lengths=(((5,), (5,)), ((70,), (150,)), ((3, 0, 66), (130, 9, 66)), ((1, 9), (64, 4)), ((130,), (259,)))
)


@pytest.mark.parametrize(("workload", "schedule", "splits"), DECODE)
def test_decode(workload, schedule, splits, device, coverage):
    inputs = cases.build(workload, device)
    coverage(cases.describe(workload, schedule), "portable", cases.check_decode(inputs, "portable", schedule, splits))


@pytest.mark.parametrize("workload", PREFILL)
def test_prefill(workload, device, coverage):
    coverage(cases.describe(workload), "portable", cases.check_prefill(cases.build(workload, device), "portable"))


def test_reference_implementation_is_the_oracle_rounded():
    for workload, schedule, splits in DECODE[::10]:
        cases.check_decode(cases.build(workload, "cpu"), "reference", schedule, splits)
    for workload in PREFILL[1::10]:
        cases.check_prefill(cases.build(workload, "cpu"), "reference")


@pytest.mark.parametrize("workload", [w for w, _, _ in DECODE if w.dtype == "bf16"][::2], ids=lambda w: w.layout)
def test_no_worse_than_low_precision_pytorch(workload):
    """bf16 PyTorch on the same inputs: scores, probabilities and sums in bf16, as eager attention has them."""
    inputs = cases.build(workload, "cpu")
    expected, _ = inputs.reference()
    args = (inputs.q, inputs.cache, inputs.block_table, inputs.seq_lens)
    o = attention_decode(*args, num_query_tokens=workload.num_query_tokens, implementation="portable")
    assert relative_error(o, expected) <= relative_error(cases.eager_bf16(inputs), expected)


SMALL = Workload(
    suite="decode", case="small", q_lens=(2, 2), kv_lens=(3, 40), num_q_heads=4, num_kv_heads=2, page_size=16
)


@pytest.fixture
def decode_args():
    inputs = cases.build(SMALL, "cpu")
    return dict(
        q=inputs.q, cache=inputs.cache, block_table=inputs.block_table, seq_lens=inputs.seq_lens, num_query_tokens=2
    )


@pytest.mark.parametrize("implementation", ["portable", "reference"])
def test_packed_keys_and_values(implementation):
    starts = torch.tensor([0, 70, 70, 75], dtype=torch.int32)
    q = torch.randn(75, 4, 64).bfloat16()
    kv = PackedKV(*torch.randn(2, 75, 2, 64).bfloat16())
    expected, _ = attention_prefill_reference(q, kv, None, starts, None)
    o = attention_prefill(q, kv, None, starts, None, implementation=implementation)
    assert relative_error(o, expected) < cases.BOUND["bf16"]


@pytest.mark.parametrize("implementation", ["hopper", "portable", "reference"])
def test_joint_kv_and_strided_queries(decode_args, implementation):
    cache, q = decode_args["cache"], decode_args["q"]
    joint = PagedKVCache.allocate(cache.num_pages, 16, 2, 128, layout="HND", joint=True)
    joint.k.copy_(cache.k), joint.v.copy_(cache.v)
    assert joint.k.untyped_storage().data_ptr() == joint.v.untyped_storage().data_ptr()
    wide = torch.full((4, 12, 128), math.nan, dtype=torch.bfloat16)
    wide[:, 3:7] = q
    args = decode_args | dict(implementation=implementation)
    expected = attention_decode(**args)
    assert torch.equal(attention_decode(**args | dict(cache=joint, q=wide[:, 3:7])), expected)


@pytest.mark.parametrize("implementation", ["hopper", "portable", "reference"])
def test_softmax_scale(decode_args, implementation):
    q = decode_args["q"]
    doubled = attention_decode(**decode_args | dict(q=q * 2), implementation=implementation)
    scaled = attention_decode(**decode_args, softmax_scale=2 * 128**-0.5, implementation=implementation)
    assert torch.equal(doubled, scaled)


@pytest.mark.parametrize("implementation", ["hopper", "portable", "reference"])
@pytest.mark.parametrize("schedule", ["static", "dynamic"])
def test_length_beyond_the_table_gives_nan_rows(decode_args, implementation, schedule):
    right = attention_decode(**decode_args, implementation=implementation)
    decode_args["seq_lens"] = torch.tensor([16 * decode_args["block_table"].shape[1] + 1, 40], dtype=torch.int32)
    o, lse = attention_decode(**decode_args, implementation=implementation, schedule=schedule, return_lse=True)
    assert o[:2].isnan().all() and lse[:2].isnan().all()
    torch.testing.assert_close(o[2:], right[2:], atol=4e-3, rtol=0)


@pytest.mark.parametrize("implementation", ["hopper", "portable"])
@pytest.mark.parametrize("num_clusters", [1, 2, 8])
def test_plan_for_other_lengths_gives_nan_rows(decode_args, implementation, num_clusters):
    """Whether clusters cut the request (1: no, 2: for one head, 8: for both) or not."""
    lens = torch.tensor([200, 40], dtype=torch.int32)
    plan = plan_decode(lens, 2, num_clusters=num_clusters, min_quota=1, implementation="portable")
    o = attention_decode(**decode_args, plan=plan, implementation=implementation)
    assert o[:2].isnan().all() and not o[2:].isnan().any()


@pytest.mark.parametrize("num_clusters", [1, 5, 300])
@pytest.mark.parametrize("lens", [(0, 0), (-1, 40), (0, 9999), (3, 33)])
def test_every_row_is_written(decode_args, lens, num_clusters):
    decode_args["seq_lens"] = torch.tensor(lens, dtype=torch.int32)
    plan = plan_decode(decode_args["seq_lens"], 2, num_clusters=num_clusters, min_quota=1, implementation="portable")
    out = torch.full_like(decode_args["q"], 7.0)
    attention_decode(**decode_args, plan=plan, out=out, implementation="portable")
    for rows, n in zip(out.split(2), lens, strict=True):
        assert not (rows == 7.0).any() and bool(rows.isnan().all()) != (0 <= n <= 48)


@pytest.mark.parametrize("implementation", ["portable", "reference"])
def test_mask_narrower_than_the_causal_range_gives_nan_rows(implementation):
    workload = Workload(
        suite="prefill", case="narrow", q_lens=(130,), kv_lens=(260,), num_q_heads=2, num_kv_heads=1, drop=0.5
    )
    inputs = cases.build(workload, "cpu")
    narrow = inputs.block_mask[..., :2].contiguous()  # the first 128 queries see 258 keys
    args = (inputs.q, inputs.cache, inputs.block_table, inputs.cu_seqlens_q, inputs.seq_lens)
    assert attention_prefill(*args, block_mask=narrow, implementation=implementation).isnan().all()
    one_row = inputs.block_mask[:, :, :1].contiguous()
    o = attention_prefill(*args, block_mask=one_row, implementation=implementation)
    assert not o[:128].isnan().any() and o[128:].isnan().all()


@pytest.mark.parametrize("implementation", ["portable", "reference"])
def test_mask_row_of_zeros_and_mask_of_ones(implementation):
    workload = Workload(
        suite="prefill", case="mask", q_lens=(140,), kv_lens=(200,), num_q_heads=2, num_kv_heads=1, drop=0.5
    )
    inputs = cases.build(workload, "cpu")
    args = (inputs.q, inputs.cache, inputs.block_table, inputs.cu_seqlens_q, inputs.seq_lens)
    ones = torch.ones_like(inputs.block_mask)
    dense = attention_prefill(*args, implementation=implementation)
    assert torch.equal(attention_prefill(*args, block_mask=ones, implementation=implementation), dense)
    ones[:, 1, 0] = 0
    o, lse = attention_prefill(*args, block_mask=ones, implementation=implementation, return_lse=True)
    assert (o[:128, 1] == 0).all() and (lse[:128, 1] == -math.inf).all()
    assert torch.equal(o[:, 0], dense[:, 0]) and torch.equal(o[128:], dense[128:])


def test_same_plan_gives_bitwise_equal_results(decode_args):
    plan = plan_decode(decode_args["seq_lens"], 2, num_clusters=3, min_quota=1, implementation="portable")
    o = [attention_decode(**decode_args, plan=plan, implementation="portable") for _ in range(2)]
    assert torch.equal(*o)


def test_buffers_are_used_and_nothing_is_allocated(decode_args):
    out = torch.empty_like(decode_args["q"])
    lse = torch.empty(4, 4)
    workspace = decode_workspace(**decode_args, num_splits=3).fill_(math.nan)
    buffers = dict(out=out, lse=lse, workspace=workspace, return_lse=True, num_splits=3, implementation="portable")
    o, lse_back = attention_decode(**decode_args, **buffers)
    assert o is out and lse_back is lse
    assert len(workspace) == 2 * 2 * 3 * 4 * (128 + 2) and not workspace.isnan().any(), "partial states belong there"
    with pytest.raises(ValueError, match=r"workspace must be \[6240\] or longer, see decode_workspace, got \[6239\]"):
        attention_decode(**decode_args, **buffers | dict(workspace=workspace[1:]))
    plan = plan_decode(decode_args["seq_lens"], 2, num_clusters=3, cluster_size=4)
    assert len(decode_workspace(**decode_args, plan=plan)) == 2 * 3 * 4 * (128 + 2)


def test_planned_calls_are_checked_once_per_kind_of_plan(decode_args):
    lens, checked = decode_args["seq_lens"], decode._settled.calls
    checked.clear()
    plans = [plan_decode(lens, 2, num_clusters=n, implementation="portable") for n in (3, 3, 4)]
    for plan, kinds in zip(plans, (1, 1, 2), strict=True):
        o = attention_decode(**decode_args, plan=plan, implementation="portable")
        assert len(checked) == kinds
        assert torch.equal(prepare_decode(**decode_args, plan=plan, implementation="portable")(), o)
    for bad in (plan_decode(lens, 1, num_clusters=3), replace(plans[0], cluster_size=2), replace(plans[0], tile=64)):
        with pytest.raises(ValueError, match="plan"):
            attention_decode(**decode_args, plan=bad, implementation="portable")


@pytest.mark.parametrize("implementation", ["portable", "reference"])
def test_empty_batch(implementation):
    cache = PagedKVCache.allocate(1, 16, 1, 128)
    none = torch.zeros(0, dtype=torch.int32)
    table = torch.zeros(0, 1, dtype=torch.int32)
    q = torch.zeros(0, 2, 128, dtype=torch.bfloat16)
    assert attention_decode(q, cache, table, none, implementation=implementation).shape == (0, 2, 128)
    start = torch.zeros(1, dtype=torch.int32)
    assert attention_prefill(q, cache, table, start, none, implementation=implementation).shape == (0, 2, 128)


@pytest.mark.parametrize("implementation", ["portable", "reference"])
def test_padded_q_scales(implementation):
    """HPC-Ops' [batch, heads, pad] gives what [tokens, heads] gives; too small a pad gives NaN rows, or an error."""
    w = Workload(
        suite="prefill", case="", q_lens=(50, 20), kv_lens=(60, 20), num_q_heads=4, num_kv_heads=2, dtype="fp8",
        quant="type1", page_size=16,
    )  # fmt: skip
    i = cases.build(w, "cpu")
    args = (i.q, i.cache, i.block_table, i.cu_seqlens_q, i.seq_lens)

    def run(pad, **kwargs):
        scales = replace(i.scales, q=pad_q_scale(i.scales.q, i.cu_seqlens_q, 64)[..., :pad].contiguous())
        return attention_prefill(*args, scales=scales, implementation=implementation, **kwargs)

    packed = attention_prefill(*args, scales=i.scales, implementation=implementation)
    assert torch.equal(run(64), packed) and torch.equal(run(50), packed)
    assert run(32)[:50].isnan().all() and torch.equal(run(32)[50:], packed[50:])
    with pytest.raises(ValueError, match=r"scales.q must be \[batch, num_q_heads, >= 50\], got \[2, 4, 32\]"):
        run(32, check_inputs="full")


@pytest.mark.parametrize("implementation", ["hopper", "portable", "reference"])
def test_visible_nan_is_not_hidden(decode_args, implementation):
    cache, table = decode_args["cache"], decode_args["block_table"]
    cache.k[table[1, 0].long(), 5, 1] = math.nan
    o, lse = attention_decode(**decode_args, implementation=implementation, return_lse=True)
    assert o[2:, 2:].isnan().all() and lse[2:, 2:].isnan().all()  # request 1, the heads that share KV head 1
    assert not o[2:, :2].isnan().any() and not o[:2].isnan().any()


def test_mask_of_several_requests_with_strides():
    w = Workload(suite="prefill", case="", q_lens=(130, 30), kv_lens=(260, 90), num_q_heads=4, num_kv_heads=2)
    i = cases.build(w, "cpu")
    mask = torch.rand(4, 3, 2, 5).gt(0.4).to(torch.uint8).permute(2, 0, 1, 3)[:, :, :2, 1:4]
    args = (i.q, i.cache, i.block_table, i.cu_seqlens_q, i.seq_lens)
    expected, _ = attention_prefill_reference(*args, block_mask=mask)
    assert relative_error(attention_prefill(*args, block_mask=mask, implementation="portable"), expected) < 4e-3


def _bad(name, change, error, *words):
    return pytest.param(change, error, words, id=name)


def strided(x):
    return torch.empty(*x.shape[:-1], 2 * x.shape[-1], dtype=x.dtype)[..., ::2]


def planned(args, **changes):
    return replace(plan_decode(args["seq_lens"], 2), **changes)


def uneven(cache):
    """The same pages, a number of elements apart that is no multiple of the token stride."""
    pages, tokens, heads, dim = cache.k.shape
    pool = torch.zeros(2, pages * (tokens * heads * dim + 8), dtype=cache.dtype)
    return PagedKVCache(*(x.as_strided(cache.k.shape, (tokens * heads * dim + 8, heads * dim, dim, 1)) for x in pool))


BAD_DECODE = [
    _bad("q not a tensor", lambda a: dict(q=[1]), TypeError, "q must be", "list"),
    _bad("q dtype", lambda a: dict(q=a["q"].float()), TypeError, "q must", "bfloat16", "float32"),
    _bad("q rank", lambda a: dict(q=a["q"][0]), ValueError, "q must", "batch * S", "[4, 128]"),
    _bad("q rows", lambda a: dict(q=a["q"][:3]), ValueError, "q must", "[4, *, 128]", "[3, 4, 128]"),
    _bad("q device", lambda a: dict(q=a["q"].to("meta")), ValueError, "must be on", "cpu"),
    _bad("q stride", lambda a: dict(q=strided(a["q"])), ValueError, "q must", "stride 1"),
    _bad("GQA ratio", lambda a: dict(q=a["q"][:, :3]), ValueError, "num_q_heads / num_kv_heads", "3 / 2"),
    _bad("GQA too large", lambda a: dict(q=a["q"].repeat(1, 9, 1)), ValueError, "GQA ratio", "36 / 2"),
    _bad("query tokens", lambda a: dict(num_query_tokens=6), ValueError, "num_query_tokens", "1 to 5", "6"),
    _bad("cache type", lambda a: dict(cache=(1, 2)), TypeError, "cache must be a PagedKVCache", "tuple"),
    _bad("page size", lambda a: dict(cache=PagedKVCache(a["cache"].k[:, :15], a["cache"].v[:, :15])), ValueError,
         "cache.page_size", "16", "15"),
    _bad("v shape", lambda a: dict(cache=PagedKVCache(a["cache"].k, a["cache"].v[:1])), ValueError, "cache.v"),
    _bad("head_dim", lambda a: dict(cache=PagedKVCache(a["cache"].k[..., :32], a["cache"].v[..., :32])), ValueError,
         "head_dim", "64", "32"),
    _bad("table dtype", lambda a: dict(block_table=a["block_table"].long()), TypeError, "block_table", "int64"),
    _bad("table rows", lambda a: dict(block_table=a["block_table"][:1]), ValueError, "block_table", "[2, *]"),
    _bad("lens dtype", lambda a: dict(seq_lens=a["seq_lens"].float()), TypeError, "seq_lens", "float32"),
    _bad("lens rank", lambda a: dict(seq_lens=a["seq_lens"][None]), ValueError, "seq_lens", "[1, 2]"),
    _bad("scales for bf16", lambda a: dict(scales=1), ValueError, "scales", "None for bf16"),
    _bad("schedule", lambda a: dict(schedule="fast"), ValueError, "schedule", "'dynamic'", "'fast'"),
    _bad("splits", lambda a: dict(num_splits=0), ValueError, "num_splits", "positive", "0"),
    _bad("implementation", lambda a: dict(implementation="cuda"), ValueError, "implementation", "portable", "'cuda'"),
    _bad("hopper strides", lambda a: dict(cache=uneven(a["cache"]), implementation="hopper"), ValueError,
         "token stride", "use 'portable'"),
    _bad("checks", lambda a: dict(check_inputs="some"), ValueError, "check_inputs", "full", "'some'"),
    _bad("out dtype", lambda a: dict(out=torch.empty(4, 4, 128)), TypeError, "out", "bfloat16", "float32"),
    _bad("lse shape", lambda a: dict(lse=torch.empty(4, 3)), ValueError, "lse", "[4, 4]", "[4, 3]"),
    _bad("out stride", lambda a: dict(out=torch.empty(4, 128, 4, dtype=torch.bfloat16).transpose(1, 2)), ValueError,
         "out must be contiguous"),
    _bad("workspace", lambda a: dict(workspace=torch.empty(2, 2)), ValueError, "workspace", "[2, 2]"),
    _bad("plan type", lambda a: dict(plan=(1, 2)), TypeError, "plan must be a DecodePlan", "tuple"),
    _bad("plan device", lambda a: dict(plan=planned(a, header=torch.zeros(4, device="meta").int())),
         ValueError, "plan.header must be on cpu"),
    _bad("plan dtype", lambda a: dict(plan=planned(a, records=torch.zeros(4, 4))), TypeError,
         "plan.records", "int32"),
    _bad("plan tile", lambda a: dict(plan=planned(a, tile=64)), ValueError, "plan.tile", "128", "64"),
    _bad("plan clusters", lambda a: dict(plan=planned(a, cluster_size=3)), ValueError, "plan.cluster_size", "3"),
    _bad("plan counters", lambda a: dict(plan=planned(a, cluster_size=8)), ValueError, "plan.counters",
         f"[{8 * 8 * ROW_BLOCKS}]"),
    _bad("softmax_scale", lambda a: dict(softmax_scale="x"), ValueError, "softmax_scale", "a number"),
    _bad("half a split", lambda a: dict(num_splits=2.5), ValueError, "num_splits", "2.5"),
    _bad("plan heads", lambda a: dict(plan=plan_decode(a["seq_lens"], 1)), ValueError, "plan", "2 KV heads", "1"),
    _bad("plan batch", lambda a: dict(plan=plan_decode(a["seq_lens"][:1], 2)), ValueError, "plan.offsets", "[3]"),
    _bad("plan unused", lambda a: dict(plan=plan_decode(a["seq_lens"], 2), schedule="static"), ValueError, "schedule"),
    _bad("length", lambda a: dict(seq_lens=torch.tensor([3, 9999], dtype=torch.int32), check_inputs="full"), ValueError,
         "seq_lens[1]", "48", "9999"),
    _bad("negative", lambda a: dict(seq_lens=torch.tensor([-1, 4], dtype=torch.int32), check_inputs="full"), ValueError,
         "seq_lens[0]", "-1"),
    _bad("table entry", lambda a: dict(block_table=a["block_table"] * 0 + 77, check_inputs="full"), ValueError,
         "block_table[0, 0]", "num_pages - 1", "77"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "error", "words"), BAD_DECODE)
def test_bad_decode_input(decode_args, change, error, words):
    out = torch.full_like(decode_args["q"], 7.0)
    with pytest.raises(error) as raised:
        attention_decode(**dict(out=out) | decode_args | change(decode_args))
    for word in words:
        assert word in str(raised.value), str(raised.value)
    assert (out == 7.0).all(), "something ran"


def packed(tokens):
    return PackedKV(*torch.ones(2, tokens, 1, 128).bfloat16())


BAD_PREFILL = [
    _bad("kv type", lambda a: dict(kv=(1, 2)), TypeError, "kv must be a PagedKVCache or a PackedKV", "tuple"),
    _bad("cache of lists", lambda a: dict(kv=PagedKVCache([1], 2)), TypeError, "cache.k must be", "list"),
    _bad("checks", lambda a: dict(check_inputs="some"), ValueError, "check_inputs", "'some'"),
    _bad("packed fp8", lambda a: dict(kv=PackedKV(a["q"][:, :1], a["q"][:, :1])), TypeError, "kv.k", "bfloat16"),
    _bad("packed rows", lambda a: dict(kv=packed(39), q=a["q"].bfloat16()), ValueError, "kv.k", "[40, *, *]"),
    _bad("packed with table", lambda a: dict(kv=packed(40), q=a["q"].bfloat16(), scales=None), ValueError,
         "block_table", "None for packed"),
    _bad("cu dtype", lambda a: dict(cu_seqlens_q=a["cu_seqlens_q"].long()), TypeError, "cu_seqlens_q", "int64"),
    _bad("cu batch", lambda a: dict(cu_seqlens_q=a["cu_seqlens_q"][:1]), ValueError, "cu_seqlens_q"),
    _bad("cu content", lambda a: dict(cu_seqlens_q=a["cu_seqlens_q"] + 1, check_inputs="full"), ValueError, "rising"),
    _bad("mask dtype", lambda a: dict(block_mask=a["block_mask"].bool()), TypeError, "block_mask", "uint8", "bool"),
    _bad("mask heads", lambda a: dict(block_mask=a["block_mask"][:, :1]), ValueError, "block_mask", "[1, 2, *, *]"),
    _bad("mask width", lambda a: dict(block_mask=a["block_mask"][..., :1], check_inputs="full"), ValueError,
         "block_mask", ">= 2"),
    _bad("no scales", lambda a: dict(scales=None), TypeError, "scales must be a Scales"),
    _bad("q scale", lambda a: dict(scales=replace(a["scales"], q=torch.ones(3, 2))), ValueError, "scales.q", "[40, 2]"),
    _bad("v scale", lambda a: dict(scales=replace(a["scales"], v=torch.ones(3))), ValueError, "scales.v", "[1]"),
    _bad("type 0 without k_scale", lambda a: dict(scales=replace(a["scales"], k=None)), ValueError, "cache.k_scale"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "error", "words"), BAD_PREFILL)
def test_bad_prefill_input(change, error, words):
    workload = Workload(
        suite="prefill", case="bad", q_lens=(40,), kv_lens=(200,), num_q_heads=2, num_kv_heads=1, dtype="fp8",
        quant="type1", page_size=16, drop=0.5,
    )  # fmt: skip
    i = cases.build(workload, "cpu")
    args = dict(
        q=i.q, kv=i.cache, block_table=i.block_table, cu_seqlens_q=i.cu_seqlens_q, seq_lens=i.seq_lens,
        scales=i.scales, block_mask=i.block_mask,
    )  # fmt: skip
    with pytest.raises(error) as raised:
        attention_prefill(**args | change(args))
    for word in words:
        assert word in str(raised.value), str(raised.value)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("implementation", ["portable", "reference"])
def test_opcheck_and_compile(decode_args, implementation, dynamic):
    cache, q = decode_args["cache"], decode_args["q"]
    tensors = (q, cache.k, cache.v, decode_args["block_table"], decode_args["seq_lens"])
    out, lse = torch.empty_like(q), torch.empty(4, 4)
    flat = (*tensors, *[None] * 7, 1, 1, 2, 128**-0.5, 2, 1, implementation, None, out, lse)
    tests = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(torch.ops.hpcattn.decode.default, flat, test_utils=tests)

    def step(q, k, v, table, lens, k_new):
        cache = PagedKVCache(k, v)
        append_tokens(cache, k_new, k_new, table, lens, num_query_tokens=2, implementation=implementation)
        plan = plan_decode(lens, 2, num_clusters=3, implementation=implementation)
        common = dict(return_lse=True, implementation=implementation)
        o, lse = attention_decode(q * 2, cache, table, lens, num_query_tokens=2, plan=plan, **common)
        starts = torch.arange(0, len(q) + 1, 2, dtype=torch.int32)
        return o + 1, lse, *attention_prefill(q, cache, table, starts, lens, **common)

    new = torch.randn(4, 2, 128).bfloat16()
    copies = [[x.clone() for x in (*tensors, new)] for _ in range(2)]
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for got, expected in zip(compiled(*copies[0]), step(*copies[1]), strict=True):
        assert torch.equal(got, expected)
    assert torch.equal(copies[0][1].nan_to_num(7.0), copies[1][1].nan_to_num(7.0)), "the cache was appended to"


def test_explain_says_what_would_run(decode_args):
    text = str(explain(attention_decode, **decode_args))
    assert "implementation = reference" in text and "schedule = static" in text
    chosen = explain(attention_decode, **decode_args, schedule="dynamic", implementation="portable")
    assert chosen["schedule"] == "dynamic" and chosen["implementation"] == "portable"
    with pytest.raises(ValueError, match="attention_decode, attention_prefill"):
        explain(len)
    with pytest.raises(ValueError, match="num_splits"):
        explain(attention_decode, **decode_args, num_splits=-1)
