"""`python -m hpcattn COMMAND`; each command parses its own arguments and is imported only when asked for."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

COMMANDS = {
    "doctor": ("hpcattn.doctor", "say what this machine can do and what to install for more"),
    "run": ("hpcattn.notebook_runner", "execute and render the notebooks and draw the figures"),
    "bench": ("hpcattn.bench.suites", "measure a suite of workloads and write records"),
    "figures": ("hpcattn.bench.figures", "draw the figures from the recorded data"),
    "inspect": ("hpcattn.inspection", "compile kernels for Hopper and show registers, spills, opcodes"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit status, 130 after Ctrl-C."""
    parser = argparse.ArgumentParser(
        prog="hpcattn",
        description="Attention for LLM serving on NVIDIA Hopper, in stock Triton and Gluon.",
        epilog="\n".join(["commands:", *(f"  {name:8} {text}" for name, (_, text) in COMMANDS.items())]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", choices=COMMANDS, metavar="COMMAND")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="see COMMAND --help")
    args = parser.parse_args(argv)
    try:
        return importlib.import_module(COMMANDS[args.command][0]).main(args.arguments)
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
