"""Attention kernels for LLM serving on NVIDIA Hopper, and the workbook that builds them."""

from hpcattn.append import append_tokens
from hpcattn.cache import PackedKV, PageAllocator, PagedKVCache, gather_kv, make_block_table, quantize_cache
from hpcattn.decode import attention_decode, decode_workspace, prepare_decode
from hpcattn.explanation import Explanation, explain
from hpcattn.prefill import attention_prefill, prepare_prefill
from hpcattn.quantization import Scales
from hpcattn.reference import PModel, attention_decode_reference, attention_prefill_reference, relative_error
from hpcattn.schedule import DecodePlan, plan_decode

__version__ = "0.1.0"

__all__ = [
    "DecodePlan",
    "Explanation",
    "PModel",
    "PackedKV",
    "PageAllocator",
    "PagedKVCache",
    "Scales",
    "append_tokens",
    "attention_decode",
    "attention_decode_reference",
    "attention_prefill",
    "attention_prefill_reference",
    "decode_workspace",
    "explain",
    "gather_kv",
    "make_block_table",
    "plan_decode",
    "prepare_decode",
    "prepare_prefill",
    "quantize_cache",
    "relative_error",
]
