"""The kernels of this package in the variants worth compiling offline: what tiny calls would launch."""

from __future__ import annotations

import functools

from hpcattn.inspection import Variant, variants_of

__all__ = ["offline_variants"]


def offline_variants() -> list[Variant]:
    """Every kernel of every operator, in bf16 and both fp8 types, named "operator format schedule kernel"."""
    from hpcattn.bench.workloads import FORMATS  # operators and workloads import kernels

    found = []
    for dtype, quant in FORMATS:
        form = dtype if quant == "-" else f"{dtype} {quant}"
        for name, call in _calls(dtype, quant).items():
            found += variants_of(f"{name} {form}", call)
        found += _hopper(form, dtype, quant)
        found += _hopper_prefill(form, dtype, quant)
    plans = [v for v in found if v.fn.__name__ in ("prefix_kernel", "records_kernel")]
    return [v for v in found if v not in plans] + plans[:2]  # a plan knows no format


def _hopper(form: str, dtype: str, quant: str) -> list[Variant]:
    """The Hopper decode kernel with N = 8, 16 and 32, small and large pages, static and planned; one merge kernel."""
    import hpcattn
    from hpcattn.bench.workloads import Workload

    found = []
    sizes = ((1, 8, 128, 64, "NHD"), (4, 8, 128, 16, "HND"), (5, 16, 128, 256, "NHD"), (2, 4, 64, 32, "HND"))
    for tokens, group, head_dim, page_size, layout in sizes[: 4 if dtype == "bf16" else 3]:
        x = Workload(
            suite="decode", case="", q_lens=(tokens,), kv_lens=(300,), num_q_heads=group, num_kv_heads=1, dtype=dtype,
            quant=quant, head_dim=head_dim, page_size=page_size, layout=layout,
        ).build()  # fmt: skip
        for splits in (1, 2):
            args = (x.q, x.cache, x.block_table, x.seq_lens)
            how = dict(scales=x.scales, num_query_tokens=tokens, num_splits=splits, implementation="hopper")
            name = f"hopper decode {tokens} x {group} rows, D {head_dim}, {'split' if splits > 1 else 'whole'} {form}"
            found += variants_of(name, functools.partial(hpcattn.attention_decode, *args, **how))
        for size in (1, 4):
            found += _planned(f"{tokens} x {group} rows, D {head_dim}, clusters of {size} {form}", x, size)
    merges = [v for v in found if v.fn.__name__ == "merge_kernel"]
    return [v for v in found if v not in merges] + merges[:1]


def _hopper_prefill(form: str, dtype: str, quant: str) -> list[Variant]:
    """The Hopper prefill kernel with one and two consumer warpgroups, small and large pages, dense and masked."""
    import hpcattn
    from hpcattn.bench.workloads import Workload

    found = []
    sizes = (
        (300, 128, 64, "NHD", 0.0),
        (300, 128, 16, "HND", 0.5),
        (40, 128, 256, "NHD", 0.5),
        (300, 64, 32, "HND", 0.0),
    )
    for q_len, head_dim, page_size, layout, drop in sizes[: 4 if dtype == "bf16" else 3]:
        heads = 16 if q_len > 64 else 1  # many: two warpgroups
        x = Workload(
            suite="prefill", case="", q_lens=(q_len,), kv_lens=(300,), num_q_heads=heads, num_kv_heads=1, dtype=dtype,
            quant=quant, head_dim=head_dim, page_size=page_size, layout=layout, drop=drop,
        ).build()  # fmt: skip
        args = (x.q, x.cache, x.block_table, x.cu_seqlens_q, x.seq_lens)
        how = dict(scales=x.scales, block_mask=x.block_mask, return_lse=True, implementation="hopper")
        name = f"hopper prefill D {head_dim}, pages of {page_size}{', masked' if drop else ''}, {q_len} queries {form}"
        found += variants_of(name, functools.partial(hpcattn.attention_prefill, *args, **how))
    return found


def _planned(name: str, x, cluster_size: int) -> list[Variant]:
    """The dynamic schedule in clusters of this size, with as few row blocks as there may be."""
    import hpcattn

    tokens = x.workload.num_query_tokens
    rows = tokens * x.workload.num_q_heads
    plan = hpcattn.plan_decode(
        x.seq_lens, 1, query_rows=rows, cluster_size=cluster_size, num_clusters=2, row_blocks=-(-rows // 32)
    )
    how = dict(scales=x.scales, num_query_tokens=tokens, plan=plan, implementation="hopper")
    call = functools.partial(hpcattn.attention_decode, x.q, x.cache, x.block_table, x.seq_lens, **how)
    return variants_of(f"hopper decode {name}", call)


def _calls(dtype: str, quant: str) -> dict:
    import torch

    import hpcattn
    from hpcattn.bench.workloads import Workload
    from hpcattn.kernels.portable.naive import naive_attention
    from hpcattn.kernels.portable.online import online_attention

    common = dict(num_q_heads=8, num_kv_heads=1, dtype=dtype, quant=quant)
    d = Workload(suite="decode", case="", q_lens=(2,), kv_lens=(100,), **common).build()
    p = Workload(suite="prefill", case="", q_lens=(70,), kv_lens=(100,), drop=0.5, **common).build()
    portable = dict(implementation="portable")

    def decode(**schedule):
        args = (d.q, d.cache, d.block_table, d.seq_lens)
        hpcattn.attention_decode(*args, scales=d.scales, num_query_tokens=2, return_lse=True, **schedule, **portable)

    def prefill(block_mask=None):
        args = (p.q, p.cache, p.block_table, p.cu_seqlens_q, p.seq_lens)
        hpcattn.attention_prefill(*args, scales=p.scales, block_mask=block_mask, return_lse=True, **portable)

    def append():
        new, scale = d.cache.k[0, :2], None if d.cache.k_scale is None else torch.ones(2, 1)
        args = (d.cache, new, new, d.block_table, d.seq_lens)
        hpcattn.append_tokens(*args, num_query_tokens=2, k_scale=scale, **portable)

    def single(attention):
        scales = {} if d.scales is None else dict(q_scale=d.scales.q, k_scale=d.scales.k, v_scale=d.scales.v)
        attention(d.q, d.cache.k.flatten(0, 1), d.cache.v.flatten(0, 1), **scales)

    calls = {
        "decode static": lambda: decode(num_splits=1),
        "decode split": lambda: decode(num_splits=2),
        "decode dynamic": lambda: decode(schedule="dynamic"),
        "prefill": prefill,
        "prefill masked": lambda: prefill(p.block_mask),
        "append": append,
    }
    if quant != "type0":  # one sequence without pages has no place for type 0 scales
        calls |= {"naive": lambda: single(naive_attention), "online": lambda: single(online_attention)}
    return calls
