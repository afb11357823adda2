"""spanbert_jax.main as one process of several, of which each keeps what it compiled.

jax lets only the first process write to the cache of compiled programs, though on CPUs
the others' have keys of their own: each test would compile them anew.
"""

import runpy
from typing import Any

from jax._src import compilation_cache, compiler


def _keep(
    key: str, seconds: float, name: str, backend: Any, executable: Any, _: Any
) -> None:
    compilation_cache.put_executable_and_time(
        key, name, executable, backend, int(seconds)
    )


compiler._cache_write = _keep
runpy.run_module("spanbert_jax.main", run_name="__main__", alter_sys=True)
