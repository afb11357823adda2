"""Allocators: how glibc takes memory from the system, set in a process's environment.

Standard library only: the interpreters of peers import this file, too.
"""

from collections.abc import Mapping

VARIABLE = "GLIBC_TUNABLES"

_LARGE_PAGES = "glibc.malloc.hugetlb=1"
# XLA asks for the temporaries of a step, a gigabyte, as one piece, and frees them. As
# it is, the kernel takes them back, and clears others for the next step.
_KEPT = (
    _LARGE_PAGES,
    "glibc.malloc.arena_max=1",
    f"glibc.malloc.mmap_threshold={2**40}",
    f"glibc.malloc.trim_threshold={2**40}",
)

# What is added to the environment, which must stand there before the process starts.
ALLOCATORS: Mapping[str, Mapping[str, str]] = {
    # As it comes, which has to be said lest something be set already.
    "usual": {VARIABLE: ""},
    # With large pages.
    "large": {VARIABLE: _LARGE_PAGES},
    # With large pages, and what is freed stays with the process, as in `make demo`.
    "kept": {VARIABLE: ":".join(_KEPT)},
}
