"""The compiled: programs of earlier starts, kept so that the next need not wait."""

import hashlib
import platform
from pathlib import Path

import jax


def keep_compiled(cache: Path) -> None:
    """Keeps what is compiled from now on in a directory, and looks there first.

    A cache that jax was told of, as by JAX_COMPILATION_CACHE_DIR, is left as it is. A
    program is found again if it, its devices and the libraries are the same, and
    computes the same bits; it takes a megabyte or so. If the cache cannot be written,
    jax warns and goes on.

    Args:
        cache: of this program, such as the user's.
    """
    if jax.config.jax_compilation_cache_dir:
        return
    jax.config.update(
        "jax_compilation_cache_dir", str(cache / "compiled" / _processor())
    )
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)


def _processor() -> str:
    """Names what a CPU can do: jax would take a program for one that can do more.

    Home directories are shared by machines of many kinds.
    """
    kind = platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        # Not Linux: such a home is not shared with another kind.
        return kind
    features = [line for line in lines if line.startswith(("flags", "Features"))]
    return f"{kind}-{hashlib.sha256(''.join(features[:1]).encode()).hexdigest()[:12]}"
