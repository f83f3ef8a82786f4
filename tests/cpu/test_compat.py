"""`hpcattn.compat.hpc`: HPC-Ops' decode functions, held to the oracle on a CPU; memory that may not be read is NaN."""

import inspect
import math
import weakref
from itertools import product

import cases
import pytest
import torch

import hpcattn.compat.hpc as hpc
from hpcattn import attention_decode_reference, relative_error
from hpcattn.bench.workloads import Workload
from hpcattn.compat.hpc import QuantType
from hpcattn.quantization import FP8
from hpcattn.schedule import ROW_BLOCKS, multiprocessors, plan_decode_reference, policy

TYPE0 = QuantType.QPERTOKEN_PERHEAD_KPERTOKEN_PERHEAD_VPERHEAD
TYPE1 = QuantType.QPERTOKEN_PERHEAD_KPERTENSOR_VPERTENSOR
NO_DEFAULT = inspect.Parameter.empty

PARAMETERS = {  # HPC-Ops at commit 6e2eced
    "attention_decode_bf16": {
        **dict.fromkeys(("q", "kcache", "vcache", "block_ids", "num_seq_kvcache"), NO_DEFAULT),
        **{"mtp": 0, "new_kv_included": False, "splitk": True},
        **{"task_map": None, "split_flag": None, "output": None},
    },
    "attention_decode_fp8": {
        **dict.fromkeys(("q", "kcache", "vcache", "block_ids", "num_seq_kvcache"), NO_DEFAULT),
        **dict.fromkeys(("qscale", "kscale", "vscale"), NO_DEFAULT),
        **{"mtp": 0, "new_kv_included": False, "quant_type": TYPE1, "splitk": True},
        **{"task_map": None, "split_flag": None, "output": None},
    },
    "get_attention_decode_task_workspace": {
        **dict.fromkeys(("max_num_batch", "max_seqlen", "num_head_kv"), NO_DEFAULT),
        "min_process_len": 512,
    },
    "assign_attention_decode_task": {
        **dict.fromkeys(("num_seq_kvcache", "task_map", "num_head_kv", "mtp", "new_kv_included"), NO_DEFAULT),
        "min_process_len": 512,
    },
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_signatures(name):
    parameters = inspect.signature(getattr(hpc, name)).parameters
    assert [(p.name, p.default) for p in parameters.values()] == list(PARAMETERS[name].items())
    assert all(p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters.values())


def test_quant_types():
    assert {member.name: member.value for member in QuantType} == {
        "QPERTOKEN_PERHEAD_KPERTOKEN_PERHEAD_VPERHEAD": 0,
        "QPERTOKEN_PERHEAD_KPERTENSOR_VPERTENSOR": 1,
        "QPERTENSOR_KPERTENSOR_VPERTENSOR": 2,
        "QPERTOKEN_PERHEAD_KPERTOKEN_PERHEAD_VPERHEAD_QKHADAMARD": 3,
    }


def build(quant="-", layout="NHD", kv_lens=(130, 3, 65), s=2, heads=2, group=4, page=64):
    workload = Workload(
        suite="decode", case="v_mean=1.0", q_lens=(s,) * len(kv_lens), kv_lens=kv_lens, quant=quant, layout=layout,
        dtype="bf16" if quant == "-" else "fp8", num_q_heads=heads * group, num_kv_heads=heads, page_size=page,
    )  # fmt: skip
    return cases.build(workload, "cpu")


def arguments(x) -> dict:
    """The inputs under HPC-Ops' names; type 0 K scales as the one-byte view of the rows behind those of K."""
    args = dict(q=x.q, kcache=x.cache.k, vcache=x.cache.v, block_ids=x.block_table, num_seq_kvcache=x.seq_lens)
    args |= dict(mtp=x.workload.num_query_tokens - 1, new_kv_included=True)
    if x.scales is not None:
        type0 = x.workload.quant == "type0"
        args |= dict(qscale=x.scales.q, kscale=x.cache.k_scale.view(FP8) if type0 else x.scales.k)
        args |= dict(vscale=x.scales.v, quant_type=TYPE0 if type0 else TYPE1)
    return args


def decode(args: dict, **changes):
    function = hpc.attention_decode_fp8 if "qscale" in args else hpc.attention_decode_bf16
    return function(**args | changes)


def task_map(x, lens=None, **options):
    w = x.workload
    lens = x.seq_lens if lens is None else lens
    room = hpc.get_attention_decode_task_workspace(len(lens) + 2, 4096, w.num_kv_heads)
    settings = dict(num_head_kv=w.num_kv_heads, mtp=w.num_query_tokens, new_kv_included=True) | options
    assert hpc.assign_attention_decode_task(lens, room, **settings) is room
    return room


def hold(out, x, implementation="auto"):
    expected, _ = x.reference()
    rounded_p = implementation == "portable" and x.workload.dtype == "fp8"
    assert out.dtype == torch.bfloat16 and out.shape == x.q.shape
    assert relative_error(out, expected) < (cases.PLAIN_BOUND if rounded_p else cases.BOUND["bf16"])


@pytest.fixture(params=["auto", "portable"])
def implementation(request, monkeypatch):
    monkeypatch.setattr(hpc, "IMPLEMENTATION", request.param)
    return request.param


FORMATS, LAYOUTS, BOTH = ("-", "type0", "type1"), ("NHD", "HND"), (False, True)


@pytest.mark.parametrize(("quant", "layout", "dynamic", "included"), list(product(FORMATS, LAYOUTS, BOTH, BOTH)))
def test_decode(quant, layout, dynamic, included, implementation):
    s = 3 if included else 1
    x = build(quant, layout, kv_lens=(140, 3, 65), s=s, heads=2 if included else 1, group=8 if dynamic else 4)
    lens = x.seq_lens if included else x.seq_lens - s
    how = dict(task_map=task_map(x, lens, new_kv_included=included)) if dynamic else {}
    before = [t.clone() for t in (x.cache.k, x.cache.v)]
    out = torch.full_like(x.q, math.nan, dtype=torch.bfloat16)
    args = arguments(x)
    given = decode(args, num_seq_kvcache=lens, new_kv_included=included, output=out, **how)
    assert given is out
    hold(out, x, implementation)
    if implementation == "auto":
        assert torch.equal(out, decode(args, num_seq_kvcache=lens, new_kv_included=included, **how))
    for tensor, old in zip((x.cache.k, x.cache.v), before, strict=True):
        assert torch.equal(tensor.view(torch.uint8), old.view(torch.uint8))


def test_positional_arguments():
    x = build("type0")
    args = arguments(x)
    assert list(args)[:5] == ["q", "kcache", "vcache", "block_ids", "num_seq_kvcache"]
    first, scales = list(args.values())[:5], (args["qscale"], args["kscale"], args["vscale"])
    flag, out = torch.zeros(3, 2, dtype=torch.int32), torch.empty(x.q.shape, dtype=torch.bfloat16)
    hold(hpc.attention_decode_fp8(*first, *scales, 1, True, TYPE0, True, task_map(x), flag, out), x)
    x = build()
    first = list(arguments(x).values())[:5]
    hold(hpc.attention_decode_bf16(*first, 1, True, False, None, flag, out), x)
    assert not flag.any()


@pytest.mark.parametrize("splitk", [True, False])
def test_splitk(splitk, monkeypatch):
    x, seen = build(), {}
    monkeypatch.setattr(hpc, "attention_decode", lambda *args, **options: seen.update(options))
    decode(arguments(x), splitk=splitk)
    assert (seen["schedule"], seen["num_splits"], seen["plan"]) == ("static", None if splitk else 1, None)


@pytest.mark.parametrize("dynamic", BOTH)
def test_what_hpc_ops_gets_wrong(dynamic, implementation):
    """A last chunk shorter than S - 1, 0 < L < S, L = 0, five query tokens, any ratio of heads."""
    x = build(kv_lens=(129, 2, 0, 513), s=5, heads=1, group=3, page=16)
    out = decode(arguments(x), task_map=task_map(x) if dynamic else None)
    hold(out, x, implementation)
    assert not out[10:15].any() and not out[5:8].any()  # rows that see nothing


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("joint", [False, True])
def test_k_scales_in_the_pages(layout, joint):
    """Pages as a serving engine holds them: 66 rows each, scales written as bytes by address."""
    pages, heads, page, s = 5, 2, 64, 2
    shape = (pages, 2, page + 2, heads, 128)
    pool = torch.zeros(shape if layout == "NHD" else (pages, 2, heads, page + 2, 128), dtype=torch.uint8)
    pool = pool if layout == "NHD" else pool.transpose(2, 3)
    if not joint:
        pool = torch.stack([pool[:, 0], pool[:, 1]]).transpose(0, 1)
    k, v = (torch.randn(pages, page, heads, 128).to(FP8) for _ in range(2))
    scale = torch.rand(pages, page, heads) + 0.5
    pool[:, 0, :page], pool[:, 1, :page] = k.view(torch.uint8), v.view(torch.uint8)
    for p, h, t in product(range(pages), range(heads), range(page)):
        pool[p, 0, page + t // 32, h, 4 * (t % 32) : 4 * (t % 32) + 4] = scale[p, t, h].reshape(1).view(torch.uint8)
    q, qscale = torch.randn(2 * s, 8, 128).to(FP8), torch.rand(2 * s, 8) + 0.5
    table = torch.tensor([[3, 1], [4, 0]], dtype=torch.int32)
    lens, vscale = torch.tensor([100, 33], dtype=torch.int32), torch.tensor([0.5, 2.0])

    x, expected = pool.view(FP8), torch.empty(2 * s, 8, 128, dtype=torch.float64)
    for b, h in product(range(2), range(8)):
        n = int(lens[b])
        keys = (k[table[b].long()].double() * scale[table[b].long()].unsqueeze(-1)).flatten(0, 1)[:n, h // 4]
        values = v[table[b].long()].double().flatten(0, 1)[:n, h // 4] * vscale[h // 4]
        for i in range(s):
            row, n_seen = b * s + i, n - s + 1 + i
            scores = keys[:n_seen] @ (q[row, h].double() * qscale[row, h]) / math.sqrt(128)
            expected[row, h] = scores.softmax(0) @ values[:n_seen]

    kscale = x[:, 0, page:]
    own = kscale.contiguous()  # a storage of its own: its own strides
    odd = kscale.as_strided(kscale.shape, (0, 0, 0, 1))  # in the pages: HPC-Ops never looks at these strides
    for version in (kscale, kscale.view(torch.float32), kscale.view(torch.uint8), own, own.view(torch.float32), odd):
        out = hpc.attention_decode_fp8(
            q, x[:, 0, :page], x[:, 1, :page], table, lens, qscale, version, vscale, s - 1, True, TYPE0
        )
        assert relative_error(out, expected) < cases.BOUND["bf16"]
    as_bytes = (pool[:, 0, :page], pool[:, 1, :page].view(torch.int8))
    out = hpc.attention_decode_fp8(q, *as_bytes, table, lens, qscale, kscale, vscale, s - 1, True, TYPE0)
    assert relative_error(out, expected) < cases.BOUND["bf16"]
    with pytest.raises(ValueError, match="kscale must be .* in kcache's pages"):
        last = x[:, 1, page:].as_strided(kscale.shape, (0, 0, 0, 1), x[-1, 1, page:].storage_offset())
        decode(dict(q=q, kcache=x[:, 0, :page], vcache=x[:, 1, :page], block_ids=table, num_seq_kvcache=lens,
                    qscale=qscale, kscale=last, vscale=vscale, quant_type=TYPE0), mtp=s - 1)  # fmt: skip


@pytest.mark.parametrize("dynamic", [False, True])
def test_negative_scales(dynamic, implementation):
    x = build("type1")
    for scale in (x.scales.k, x.scales.v):
        scale.neg_()
    hold(decode(arguments(x), task_map=task_map(x) if dynamic else None), x, implementation)
    scalars = dict(kscale=x.scales.k[0], vscale=x.scales.v[0])
    hold(decode(arguments(x), **scalars), x, implementation)


def test_a_task_map_is_a_plan():
    x = build(kv_lens=(700, 64, 1, 1300), s=1)
    room = task_map(x)
    plan = hpc._plan(room, 4, 2, 1)
    assert all(t.untyped_storage().data_ptr() == room.untyped_storage().data_ptr() for t in plan.tensors[:4])
    least = plan.min_quota
    header, offsets, records = plan_decode_reference([700, 64, 1, 1300], 2, plan.num_clusters, min_quota=least)
    assert (plan.header.tolist(), plan.offsets.tolist(), plan.records.tolist()) == (header, offsets, records)
    assert not plan.counters.any()


def test_min_process_len(monkeypatch):
    x, seen = build(), []
    monkeypatch.setattr(hpc, "plan_decode", lambda *args, out, **options: seen.append(out.min_quota))
    for least in (1, 512, 1024, 2**40):
        task_map(x, min_process_len=least)
    assert seen[0] == seen[1] <= seen[2] == 8 and seen[3] == 8192


def test_a_task_map_is_reused(implementation):
    """For fewer requests, as int32, as a view, and for other lengths without being assigned anew."""
    x = build(kv_lens=(700, 64, 5), s=1)
    room = task_map(x)
    for view in (room, room.view(torch.int32), room.view(-1, 4), room[:]):
        hold(decode(arguments(x), task_map=view), x, implementation)
    assert not hpc._plan(room, 3, 2, 1).counters.any()
    assert hpc._plan(room, 3, 2, 1) is hpc._plan(room, 3, 2, 1) is not hpc._plan(room, 2, 2, 1)
    address, watch = room.data_ptr(), weakref.ref(room)
    y = build(kv_lens=(900, 300), s=1)
    hpc.assign_attention_decode_task(y.seq_lens, room, 2, 1, True)
    hold(decode(arguments(y), task_map=room), y, implementation)
    assert hpc._plan(room, 2, 2, 1).header.data_ptr() == address
    moved = room.clone()
    hold(decode(arguments(y), task_map=moved), y, implementation)
    room.set_(moved)
    room_plan = hpc._plan(room, 2, 2, 1)
    assert room_plan.header.data_ptr() == moved.data_ptr() != address
    del room, view
    assert watch() is None  # the plan that it keeps does not keep it
    if implementation == "portable":
        stale = decode(arguments(y), task_map=task_map(y, torch.tensor([700, 290], dtype=torch.int32)))
        assert stale[0].isnan().all()
        assert relative_error(stale[1:], y.reference()[0][1:]) < cases.BOUND["bf16"]  # both have three tiles


@pytest.mark.parametrize(("sms", "hopper"), list(product((1, 20, 78, 114, 132, 148), BOTH)))
def test_a_workspace_holds_every_plan(sms, hopper, monkeypatch):
    monkeypatch.setattr(hpc, "multiprocessors", lambda device: sms)
    monkeypatch.setattr(hpc, "is_hopper", lambda device: hopper)
    hpc._layout.cache_clear()
    try:
        for heads, batch in product((1, 4, 128), (1, 16, 200, 2048)):
            room = hpc.get_attention_decode_task_workspace(batch, 2**17, heads)
            for s, fewer in product(range(1, 6), (1, batch)):
                parts, (longest, quota, size, blocks) = hpc._layout(room.device, fewer, heads, s)
                assert 4 * sum(parts) <= room.numel() and not sum(parts[:4]) % 4
                chosen = policy(math.inf, 8 * s, torch.bfloat16, sms, hopper)
                names = ("num_clusters", "cluster_size", "row_blocks", "min_quota")
                assert (parts[1] // 8, size, blocks, quota) == tuple(chosen[name][0] for name in names)
                assert parts[2] == parts[1] // 8 * size * ROW_BLOCKS
                assert math.ceil(longest / 128) * fewer * heads < 2**31
    finally:
        hpc._layout.cache_clear()


def test_nothing_is_copied_or_read_back(monkeypatch):
    """Views only, and no host access to a tensor's content, as far as Python can tell."""
    x = build("type0", s=1)
    args, room = arguments(x), task_map(x)
    seen = []
    monkeypatch.setattr(hpc, "attention_decode", lambda q, cache, *args, **options: seen.append((cache, options)))
    for name in ("item", "tolist", "cpu", "__bool__", "__int__", "contiguous", "clone"):
        monkeypatch.setattr(torch.Tensor, name, lambda *args, name=name: pytest.fail(name))
    decode(args, task_map=room)
    ((cache, options),) = seen
    assert (cache.k.data_ptr(), cache.v.data_ptr()) == (x.cache.k.data_ptr(), x.cache.v.data_ptr())
    assert cache.k_scale.data_ptr() == x.cache.k_scale.data_ptr()
    assert cache.k_scale.stride() == x.cache.k_scale.stride()
    assert options["plan"].header.data_ptr() == room.data_ptr()


WRONG_CALLS = [
    ("-", dict(q=None), TypeError, "q must be a torch.Tensor, got NoneType"),
    ("-", dict(mtp=5), ValueError, "mtp must be an integer from 0 to 4, got 5"),
    ("-", dict(mtp=1.0), ValueError, "mtp must be"),
    ("-", dict(mtp=0), ValueError, r"q must have shape \[3, "),
    ("-", dict(kcache=torch.zeros(2, 64, 2, 128)), TypeError, "kcache must have dtype torch.bfloat16"),
    ("-", dict(kcache=torch.zeros(64, 2, 128).bfloat16()), ValueError, "kcache must be"),
    ("-", dict(kcache=torch.zeros(2, 20, 2, 128).bfloat16()), ValueError, r"vcache must have shape \[2, 20"),
    ("-", dict(vcache=torch.zeros(1, 64, 2, 128).bfloat16()), ValueError, "vcache must have shape"),
    ("-", dict(q=torch.zeros(6, 7, 128).bfloat16()), ValueError, "GQA ratio"),
    ("-", dict(q=torch.zeros(6, 8, 128)), TypeError, "q must have dtype torch.bfloat16"),
    ("-", dict(block_ids=torch.zeros(3, 3, dtype=torch.int64)), TypeError, "block_ids must have dtype torch.int32"),
    ("-", dict(block_ids=torch.zeros(4, 3, dtype=torch.int32)), ValueError, "block_ids must have shape"),
    ("-", dict(num_seq_kvcache=[1, 2, 3]), TypeError, "num_seq_kvcache must be a torch.Tensor"),
    ("-", dict(num_seq_kvcache=torch.ones(3)), TypeError, "num_seq_kvcache must have dtype torch.int32"),
    ("-", dict(num_seq_kvcache=torch.ones(3), new_kv_included=False), TypeError, "num_seq_kvcache must have dtype"),
    ("-", dict(num_seq_kvcache=torch.ones(3, 1, dtype=torch.int32)), ValueError, "num_seq_kvcache must have shape"),
    ("-", dict(output=torch.zeros(6, 8, 128)), TypeError, "output must have dtype torch.bfloat16"),
    ("-", dict(output=torch.zeros(6, 4, 128).bfloat16()), ValueError, "output must have shape"),
    ("-", dict(split_flag=0), TypeError, "split_flag must be a torch.Tensor"),
    ("-", dict(task_map="map"), TypeError, "task_map must be a torch.Tensor"),
    ("-", dict(task_map=torch.zeros(9999)), TypeError, "task_map must have dtype torch.int8 or torch.int32"),
    ("-", dict(task_map=torch.zeros(64, dtype=torch.int8)), ValueError, "task_map must be .* bytes or more"),
    ("-", dict(task_map=torch.zeros(9999, 4, dtype=torch.int8)[:, 0]), ValueError, "task_map must be contiguous"),
    ("-", dict(task_map=torch.zeros(9999, dtype=torch.int32)[1:]), ValueError, "task_map must be .*aligned"),
    ("-", dict(task_map=torch.zeros(9999, dtype=torch.int32), splitk=False), ValueError, "splitk must be True"),
    ("type0", dict(kscale=None), TypeError, "kscale must be a torch.Tensor"),
    ("type0", dict(kscale=torch.ones(1)), ValueError, "kscale must have shape"),
    ("type0", dict(kscale=torch.ones(8, 2, 2, 64).bfloat16()), TypeError, "kscale must have dtype"),
    ("type0", dict(vscale=torch.ones(1)), ValueError, r"vscale must have shape \[2\]"),
    ("type0", dict(kcache=torch.zeros(8, 64, 2, 128)), TypeError, "kcache must have dtype"),
    ("type0", dict(quant_type=0), TypeError, "quant_type must be a QuantType"),
    ("type0", dict(quant_type=QuantType.QPERTENSOR_KPERTENSOR_VPERTENSOR), ValueError, "quant_type must be one of"),
    ("type0", dict(quant_type=TYPE1), TypeError, "kscale must have dtype torch.float32"),
    ("type1", dict(kscale=torch.ones(2)), ValueError, r"kscale must have shape \[1\]"),
    ("type1", dict(qscale=torch.ones(3, 8)), ValueError, "qscale must have shape"),
    ("type1", dict(qscale=torch.ones(6, 8).double()), TypeError, "qscale must have dtype torch.float32"),
    ("type1", dict(q=torch.zeros(6, 8, 128).bfloat16()), TypeError, "q must have dtype torch.float8_e4m3fn"),
    ("type1", dict(quant_type=TYPE0), ValueError, "kscale must have shape"),
]


@pytest.mark.parametrize(("quant", "change", "error", "message"), WRONG_CALLS)
def test_wrong_arguments(quant, change, error, message):
    with pytest.raises(error, match=message):
        decode(arguments(build(quant)), **change)


WRONG_PLANS = [
    (dict(num_seq_kvcache=[1]), TypeError, "num_seq_kvcache must be a torch.Tensor"),
    (dict(num_seq_kvcache=torch.ones(3)), TypeError, "num_seq_kvcache must have dtype"),
    (dict(num_seq_kvcache=torch.ones(3, 3, dtype=torch.int32)), ValueError, "num_seq_kvcache must have shape"),
    (dict(num_seq_kvcache=torch.ones(9000, dtype=torch.int32)), ValueError, "task_map must be .*for 9000 requests"),
    (dict(task_map=None), TypeError, "task_map must be a torch.Tensor"),
    (dict(mtp=0), ValueError, "mtp must be the number of query tokens"),
    (dict(mtp=6), ValueError, "mtp must be"),
    (dict(num_head_kv=0), ValueError, "num_head_kv must be"),
    (dict(min_process_len=0), ValueError, "min_process_len must be"),
]


@pytest.mark.parametrize(("change", "error", "message"), WRONG_PLANS)
def test_wrong_assignments(change, error, message):
    lens = torch.tensor([5, 6], dtype=torch.int32)
    room = hpc.get_attention_decode_task_workspace(2, 4096, 2)
    right = dict(num_seq_kvcache=lens, task_map=room, num_head_kv=2, mtp=1, new_kv_included=True)
    with pytest.raises(error, match=message):
        hpc.assign_attention_decode_task(**right | change)


@pytest.mark.parametrize("name", ["max_num_batch", "max_seqlen", "num_head_kv", "min_process_len"])
def test_wrong_workspaces(name):
    right = dict(max_num_batch=2, max_seqlen=4096, num_head_kv=2)
    with pytest.raises(ValueError, match=f"{name} must be a positive integer"):
        hpc.get_attention_decode_task_workspace(**right | {name: 0})
    room = hpc.get_attention_decode_task_workspace(**right)
    assert room.dtype == torch.int8 and room.is_contiguous() and not room.any()
    assert multiprocessors(room.device) > 0


def test_compiled():
    x = build("type0")
    args, room = arguments(x), task_map(x)
    for changes in ({}, {"task_map": room}):
        compiled = torch.compile(lambda changes=changes: decode(args, **changes), fullgraph=True, backend="eager")
        hold(compiled(), x)
    assert torch.equal(compiled(), decode(args, task_map=room))
    reference, _ = attention_decode_reference(
        x.q, x.cache, x.block_table, x.seq_lens, scales=x.scales, num_query_tokens=2
    )
    assert relative_error(compiled(), reference) < cases.BOUND["bf16"]
