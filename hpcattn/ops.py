"""Registration with `torch.library`, so that `torch.compile`, CUDA graphs and `opcheck` see ordinary operators.

Every operator here writes into tensors it is given and returns nothing, which makes its fake kernel empty and its eager
call cheap (`define` + `impl`; the `custom_op` decorator costs 40-120 µs a call). Thin Python functions in `decode.py`,
`prefill.py` ... check the arguments, flatten plans, caches and scales into tensors, and allocate results.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

_library = torch.library.Library("hpcattn", "DEF")


def define_operator(schema: str, fn: Callable[..., None]) -> None:
    """Register `hpcattn::name(arguments) -> ()` for CPU and CUDA tensors."""
    name = schema.partition("(")[0]
    _library.define(f"{schema} -> ()", tags=torch.Tag.pt2_compliant_tag)

    def on_its_device(x: torch.Tensor, *args) -> None:  # Triton launches on the current device and stream
        if torch.cuda.current_device() == x.device.index:
            return fn(x, *args)
        with torch.cuda.device(x.device):
            fn(x, *args)

    _library.impl(name, fn, "CPU")
    _library.impl(name, on_its_device, "CUDA")
    torch.library.register_fake(f"hpcattn::{name}", lambda *args: None, lib=_library)
