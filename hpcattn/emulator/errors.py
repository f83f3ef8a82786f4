"""What the emulator raises. Every message says which instruction, on which line, and which warp of which CTA."""

from __future__ import annotations


class EmulatorError(Exception):
    """The kernel cannot be run, or did something that the hardware forbids."""


class UnsupportedInstruction(EmulatorError):
    """An instruction, or a form of one, that the emulator does not know."""


class Deadlock(EmulatorError):
    """No warp can go on; the message lists who waits for which barrier and phase."""


class UnwrittenRead(EmulatorError):
    """Memory was read that nothing had written, or whose asynchronous copy was still under way."""


class OutOfBounds(EmulatorError):
    """An address outside every buffer, or outside shared memory."""


class BarrierMisuse(EmulatorError):
    """Too many arrivals, transfer bytes that do not add up, an uninitialized mbarrier."""
