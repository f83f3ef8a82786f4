"""Lesson 02: its exercise's checkers, its solutions, and the kernels that the notebook builds."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import nbformat
import pytest
import torch

from hpcattn.inspection import variants_of
from hpcattn.lessons import exercise
from hpcattn.lessons.paged import check_append_hnd, check_gather_hnd
from hpcattn.reference import attention_decode_reference, relative_error

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
PRELUDE = """
import numpy as np
import torch
import triton
import triton.language as tl
from hpcattn import PagedKVCache, append_tokens, make_block_table
from hpcattn.kernels.jit import jit
DEVICE = "cpu"
"""
KERNELS = ("token-rows", "scores-kernel", "softmax-kernel", "values-kernel", "paged-decode", "inputs", "append-kernel")


def cells(notebook: str, *ids: str) -> list[str]:
    found = {cell.id: cell.source for cell in nbformat.read(NOTEBOOKS / notebook, as_version=4).cells}
    return [found[id] for id in ids]


def module_of(folder: Path, notebook: str, *ids: str):
    """Cells of a notebook as a module (Triton reads a kernel's source from its file)."""
    path = folder / "cells.py"
    path.write_text("\n\n".join([PRELUDE, *cells(notebook, *ids)]))
    spec = importlib.util.spec_from_file_location(f"cells_{abs(hash(ids))}", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def solution(tmp_path_factory):
    return module_of(tmp_path_factory.mktemp("solution"), "solutions/02_paged_kv.ipynb", "row", "append", "gather")


@pytest.fixture(scope="module")
def lesson(tmp_path_factory):
    return module_of(tmp_path_factory.mktemp("lesson"), "02_paged_kv.ipynb", *KERNELS)


def test_solutions_pass(solution):
    check_append_hnd(solution.append_hnd)
    check_gather_hnd(solution.gather_hnd)


def test_stubs_are_not_attempted(tmp_path):
    stubs = module_of(tmp_path, "02_paged_kv.ipynb", "stub-append", "stub-gather")
    assert exercise(check_append_hnd, stubs.append_hnd).status == "not attempted"
    assert exercise(check_gather_hnd, stubs.gather_hnd).status == "not attempted"


def hnd(memory, num_kv_heads, page_size, head_dim):
    return memory.view(-1, num_kv_heads, page_size, head_dim)


def appending(place):
    """A plausible append: `place(pages, table, request, position, page_size)` is the `[heads, D]` slot it writes to."""

    def append_hnd(memory, new, block_table, seq_lens, page_size):
        _, heads, dim = new.shape
        s = new.shape[0] // len(seq_lens)
        for row, token in enumerate(new):
            request, position = row // s, int(seq_lens[row // s]) - s + row % s
            place(hnd(memory, heads, page_size, dim), block_table, request, position, page_size)[:] = token

    return append_hnd


def right_place(pages, table, request, position, page_size):
    return pages[int(table[request, position // page_size]), :, position % page_size]


def only(place):
    """Drops tokens before position 0."""
    dropped = torch.empty(64, 64)

    def guarded(pages, table, request, position, page_size):
        if position < 0:
            return dropped[: pages.shape[1], : pages.shape[3]]
        return place(pages, table, request, position, page_size)

    return guarded


def nhd_place(pages, table, request, position, page_size):
    num_pages, heads, _, dim = pages.shape
    as_nhd = pages.view(num_pages, page_size, heads, dim)
    return as_nhd[int(table[request, position // page_size]), position % page_size]


def wrapping_place(pages, table, request, position, page_size):
    return right_place(pages, table.clamp(0, pages.shape[0] - 1), request, position, page_size)


def contiguous_place(pages, table, request, position, page_size):
    first = int(table[request, 0])  # as if the request's pages followed one another
    return pages[(first + position // page_size) % pages.shape[0], :, position % page_size]


def early_place(pages, table, request, position, page_size):
    return right_place(pages, table, request, max(0, position - 1), page_size)


def tidy_place(pages, table, request, position, page_size):
    slot = right_place(pages, table, request, position, page_size)
    pages[int(table[request, position // page_size]), :, position % page_size + 1 :] = 0  # "clean" the rest of the page
    return slot


def test_append_checker_passes_the_right_place():
    check_append_hnd(appending(only(right_place)))


@pytest.mark.parametrize(
    "place",
    [only(nhd_place), wrapping_place, only(contiguous_place), only(early_place), only(tidy_place)],
    ids=["NHD", "wraps around", "leaks into the next page", "one early", "clears the page"],
)
def test_append_checker_finds(place):
    with pytest.raises(AssertionError, match=r"expected: (.|\n)*found: "):
        check_append_hnd(appending(place))


def gathering(page_of, *, layout="HND", whole_pages=False):
    """A plausible gather: `page_of(table, request, i)` is the page it takes for the request's i-th."""

    def gather_hnd(memory, block_table, request, seq_len, page_size, num_kv_heads, head_dim):
        pages = hnd(memory, num_kv_heads, page_size, head_dim)
        count = -(-seq_len // page_size)
        taken = [page_of(block_table, request, i) % pages.shape[0] for i in range(count)]
        got = pages[torch.tensor(taken, dtype=torch.long)]
        got = got.transpose(1, 2) if layout == "HND" else got.reshape(-1, page_size, num_kv_heads, head_dim)
        got = got.reshape(-1, num_kv_heads, head_dim)
        return got if whole_pages else got[:seq_len]

    return gather_hnd


def table_page(table, request, i):
    return int(table[request, i])


def next_page(table, request, i):
    return int(table[request, 0]) + i  # physically contiguous: what follows belongs to others


def neighbor_page(table, request, i):
    return int(table[(request + 1) % len(table), i])


def test_gather_checker_passes_the_table():
    check_gather_hnd(gathering(table_page))


@pytest.mark.parametrize(
    "wrong",
    [
        gathering(table_page, layout="NHD"),
        gathering(table_page, whole_pages=True),
        gathering(next_page),
        gathering(neighbor_page),
        lambda *args: gathering(table_page)(*args).flip(1),
        lambda *args: gathering(table_page)(*args).nan_to_num(0.0) * 0,
        lambda memory, *args: gathering(table_page)(memory.nan_to_num_(0.0), *args),
    ],
    ids=["NHD", "whole pages", "next page", "another request's pages", "heads reversed", "zeros", "writes"],
)
def test_gather_checker_finds(wrong):
    with pytest.raises(AssertionError):
        check_gather_hnd(wrong)


def test_gather_checker_names_the_victim_of_a_page_leak():
    with pytest.raises(AssertionError, match=r"request 0:\n(.|\n)*expected: request 0, (.|\n)*found: .*request [1-9]"):
        check_gather_hnd(gathering(neighbor_page))


@pytest.mark.parametrize(
    ("layout", "page_size", "s", "joint"), [("NHD", 16, 1, True), ("HND", 32, 5, False), ("HND", 128, 2, True)]
)
def test_the_lessons_kernel(lesson, layout, page_size, s, joint):
    inputs = lesson.decode_inputs([0, 3, 64, 129], page_size, layout, S=s, group=3, num_kv_heads=2, joint=joint)
    o, lse = lesson.paged_decode(*inputs, s)
    o_ref, lse_ref = attention_decode_reference(*inputs, num_query_tokens=s)
    assert relative_error(o, o_ref) <= 4e-3
    torch.testing.assert_close(lse.double(), lse_ref, atol=1e-3, rtol=0)


def test_the_lessons_kernel_without_the_mask_gives_nan(lesson):
    inputs = lesson.decode_inputs([5, 64], 64, "NHD", S=1, num_kv_heads=1)
    o, _ = lesson.paged_decode(*inputs, 1, masked=False)
    assert o[0].isnan().all() and not o[1].isnan().any()


def test_the_lessons_kernels_compile_for_hopper(lesson):
    inputs = lesson.decode_inputs([5, 64], 64, "HND", S=2, head_dim=128)
    _, cache, table, seq_lens = inputs

    def launches():
        lesson.paged_decode(*inputs, 2)
        lesson.append(cache.k, torch.empty(4, 2, 128, dtype=torch.bfloat16), table, seq_lens, 2)

    compiled = [variant.compile() for variant in variants_of("lesson 02", launches)]
    assert len(compiled) == 4 and not any(c.spill_store_bytes for c in compiled)
