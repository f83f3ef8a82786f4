"""PTX text → a `Program`: instructions with split operands, labels resolved, parameters, source lines."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain

from hpcattn.emulator.errors import EmulatorError

_LABEL = re.compile(r"([\w$]+):\s*(?!:)")
_INSTRUCTION = re.compile(r"(?:@(!?)([%\w$]+)\s+)?([a-z][\w.:]*)\s*(.*)$", re.S)
_PARAMETER = re.compile(r"\.param\s+([^,()]*?)([\w$]+)(\[\d+\])?\s*(?:,|$)", re.M)
_LOCATION = re.compile(r"\.loc\s.*//\s*(?:.*[/\s])?([\w.<>-]+:\d+)")


@dataclass(frozen=True)
class Instruction:
    """One instruction; `operands` are split at top-level commas, braces and brackets kept."""

    index: int  # in the program
    opcode: str  # "ld.global.v4.b32"
    operands: tuple[str, ...]
    predicate: str | None
    negated: bool  # the predicate
    line: int  # of the PTX text, from 1
    source: str  # "kernel.py:12", or "" if the PTX does not say
    scope: tuple[int, ...]  # enclosing { } blocks, outermost first

    @property
    def parts(self) -> tuple[str, ...]:
        return tuple(self.opcode.split("."))

    def __str__(self) -> str:
        guard = f"@{'!' * self.negated}{self.predicate} " if self.predicate else ""
        place = f"PTX line {self.line}" + (f", {self.source}" if self.source else "")
        return f"`{guard}{self.opcode} {', '.join(self.operands)}` ({place})"


@dataclass
class Program:
    """A kernel's code: branch targets are indices into `instructions`."""

    name: str
    parameters: list[tuple[str, bool]]  # name, whether it is a tensor map (passed by value)
    instructions: list[Instruction] = field(default_factory=list)
    labels: dict[tuple[tuple[int, ...], str], int] = field(default_factory=dict)  # (scope, name)
    tables: dict[str, list[str]] = field(default_factory=dict)  # jump tables of brx.idx
    cluster: int | None = None  # CTAs per cluster, if the PTX says so
    threads: int | None = None  # per CTA, likewise

    @cached_property
    def occurrences(self) -> Counter[str]:
        """How often each register is named."""
        named = (re.findall(r"%?\b[A-Za-z_]\w*", " ".join(i.operands) + f" {i.predicate}") for i in self.instructions)
        return Counter(chain.from_iterable(named))

    def target(self, instruction: Instruction, label: str) -> int:
        """Where `label` points, seen from `instruction`: labels of inline assembly are local to their block."""
        scope = instruction.scope
        while (scope, label) not in self.labels:
            if not scope:
                raise EmulatorError(f"no label {label} for {instruction}")
            scope = scope[:-1]
        return self.labels[scope, label]


def parse(ptx: str) -> Program:
    """The one kernel of `ptx`. Raises EmulatorError if there is none, or several, or a statement is not PTX."""
    entries = [m.start() for m in re.finditer(r"^\s*\.visible \.entry", ptx, re.M)]
    if len(entries) != 1:
        raise EmulatorError(f"the PTX must hold one kernel (.visible .entry), found {len(entries)}")
    head, brace, _ = ptx[entries[0] :].partition("\n{")
    if not brace:
        raise EmulatorError("the kernel has no body")
    name = re.search(r"\.entry\s+([\w$]+)", head)[1]
    signature = head[head.find("(") + 1 : head.rfind(")")] if "(" in head else ""
    parameters = [(m[2], m[3] is not None) for m in _PARAMETER.finditer(signature)]
    cluster = re.search(r"\.reqnctapercluster\s+(\d+)", head)
    threads = re.search(r"\.(?:reqntid|maxntid)\s+(\d+)", head)
    program = Program(name, parameters, cluster=cluster and int(cluster[1]), threads=threads and int(threads[1]))
    body = entries[0] + len(head) + len(brace)
    _Body(program).read(ptx[body:], first_line=ptx[:body].count("\n") + 1)
    return program


class _Body:
    """Reads statements, keeping track of blocks, labels and source lines."""

    def __init__(self, program: Program):
        self.program = program
        self.scope: tuple[int, ...] = ()
        self.blocks = 0
        self.source = ""
        self.last_label = ""
        self.closed = False

    def read(self, text: str, first_line: int) -> None:
        statement, start = "", first_line
        for number, raw in enumerate(text.split("\n"), first_line):
            if location := _LOCATION.search(raw):
                self.source = location[1]
            line = raw.partition("//")[0].strip()
            if line.startswith((".loc", ".pragma")):
                continue
            for i, piece in enumerate(line.split(";")):
                if i:
                    self.statement(statement, start)
                    statement = ""
                if not statement:
                    start = number
                    piece = self.prefix(piece.strip())
                statement += (" " if statement else "") + piece
                if self.closed:
                    return
        raise EmulatorError("the kernel's body has no end")

    def prefix(self, text: str) -> str:
        """Take labels and braces off the start of a statement."""
        while text and not self.closed:
            if label := _LABEL.match(text):
                self.last_label = label[1]
                self.program.labels[self.scope, label[1]] = len(self.program.instructions)
                text = text[label.end() :].strip()
            elif text[0] == "{":
                self.blocks += 1
                self.scope += (self.blocks,)
                text = text[1:].strip()
            elif text[0] == "}":
                self.closed = not self.scope
                self.scope = self.scope[:-1]
                text = text[1:].strip()
            else:
                return text
        return ""

    def statement(self, text: str, line: int) -> None:
        text = text.strip()
        if text.startswith(".branchtargets"):
            self.program.tables[self.last_label] = [t.strip() for t in text.removeprefix(".branchtargets").split(",")]
        elif text and not text.startswith("."):
            match = _INSTRUCTION.match(text)
            if not match:
                raise EmulatorError(f"line {line} is not a PTX statement: {text!r}")
            negated, predicate, opcode, operands = match.groups()
            index = len(self.program.instructions)
            self.program.instructions.append(
                Instruction(index, opcode, split(operands), predicate, bool(negated), line, self.source, self.scope)
            )


def split(text: str) -> tuple[str, ...]:
    """Split at the commas outside braces and brackets: "{a, b}, [c]" → ("{a, b}", "[c]")."""
    parts, depth, current = [], 0, ""
    for c in text:
        depth += (c in "{[(") - (c in "}])")
        if c == "," and depth == 0:
            parts.append(current.strip())
            current = ""
        else:
            current += c
    return (*parts, current.strip()) if current.strip() or parts else ()
