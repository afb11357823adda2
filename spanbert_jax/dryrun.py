"""Compiles a config for a slice that is not there, and says what a run would take.

python -m spanbert_jax.dryrun --config=configs/large.py --topology=v5e:8x8
"""

import dataclasses
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from absl import flags
from ml_collections import ConfigDict, config_flags

from spanbert_jax import settings
from spanbert_jax.errors import InputError, run

if TYPE_CHECKING:
    from spanbert_jax.training.forecast import Forecast

_CONFIG = config_flags.DEFINE_config_file(
    "config",
    None,
    "The recipe, such as configs/large.py; --config.a.b=value overrides a setting.",
)
_TOPOLOGY = flags.DEFINE_string(
    "topology",
    None,
    "The slice: v5e:XxY, v6e:XxY, v4:XxYxZ, v5p:XxYxZ, gpu:CHIPxCOUNT or cpu:COUNT.",
)
_UTILIZATION = flags.DEFINE_float(
    "utilization",
    0.4,
    "Share of the chips' peak FLOPs in bfloat16 that a step is assumed to reach.",
)
_VOCAB_SIZE = flags.DEFINE_integer(
    "vocab_size",
    None,
    "Entries of the vocabulary; if unset, those of data.corpus where it is on this"
    " machine, else 28,996, BERT's cased ones.",
    lower_bound=1,
)
_COMPILE = flags.DEFINE_boolean(
    "compile",
    True,
    "Ask the slice's compiler: minutes, and to the byte. --nocompile estimates the"
    " memory instead, in seconds, and needs no compiler.",
)
_JSON = flags.DEFINE_boolean("json", False, "Print one JSON object.")
flags.mark_flags_as_required(["config", "topology"])

_BERT_CASED = 28_996
_NO_COMPILER = (
    "compiler     not installed: pip install 'jax[cuda12]', best into an environment of"
    " its own"
)
_GIB = 2**30


def main(argv: Sequence[str]) -> None:
    """Prints the forecast."""
    del argv  # Empty: errors.run refuses what is not a flag.
    config = _CONFIG.value
    try:
        settings.validate(config)
    # A config whose file could not be read complains at its first use.
    except OSError as error:
        raise InputError(f"--config: {error}") from error
    if not 0 < _UTILIZATION.value <= 1:
        raise InputError(
            f"--utilization={_UTILIZATION.value}: it must be above 0 and at most 1"
        )
    # Before jax is imported: it must not look for the accelerators of this machine.
    os.environ["JAX_PLATFORMS"] = "cpu"
    # Nor take a program from a cache, where nothing but the program is.
    os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"
    from spanbert_jax.training.forecast import make_forecast
    from spanbert_jax.training.topology import parse_topology

    topology = parse_topology(_TOPOLOGY.value)
    # What a slice without a compiler of its own is laid out on.
    os.environ["XLA_FLAGS"] = (
        f"{os.environ.get('XLA_FLAGS', '')}"
        f" --xla_force_host_platform_device_count={topology.size}"
    )
    forecast = make_forecast(
        config,
        topology,
        _vocab_size(config),
        _UTILIZATION.value,
        _COMPILE.value,
    )
    if _JSON.value:
        print(json.dumps(as_json(forecast)))
    else:
        print(*describe(forecast), sep="\n")
        if _COMPILE.value and not forecast.compiled:
            print(_NO_COMPILER)


def _vocab_size(config: ConfigDict) -> int:
    """The flag's; else that of the corpus, if it is here; else BERT's."""
    if _VOCAB_SIZE.value is not None:
        return _VOCAB_SIZE.value
    names = [name for name in config.data.corpus.split(",") if name.strip()]
    here = [name == settings.EMBEDDED or Path(name.strip()).is_dir() for name in names]
    if here and all(here):
        return settings.open_corpora(config).tokenizer.vocab_size
    return _BERT_CASED


def as_json(forecast: "Forecast") -> dict[str, Any]:
    """A forecast as an object of JSON."""
    fields = dataclasses.asdict(forecast)
    return fields | {"memory": fields["memory"] | {"total": forecast.memory.total}}


def describe(forecast: "Forecast") -> Iterator[str]:
    """Yields the lines that show a forecast to a reader."""
    axes = " ".join(f"{axis}={size}" for axis, size in forecast.mesh.items())
    yield (
        f"slice        {forecast.topology}: {forecast.devices} x"
        f" {forecast.device_kind}, mesh {axes}"
    )
    yield (
        f"model        {forecast.parameters:,} parameters, with a vocabulary of"
        f" {forecast.vocab_size:,}"
    )
    batch, parts = forecast.batch, forecast.accumulation
    share = batch.rows // (parts * forecast.mesh["data"] * forecast.mesh["fsdp"])
    yield (
        f"batch        {batch.rows:,} rows of {batch.block_length}, {share} a device"
        + (f" in each of {parts} microbatches" if parts > 1 else "")
    )
    yield from _describe_memory(forecast)
    yield (
        f"compute      {forecast.flops / 1e12:,.1f} TFLOP a step,"
        f" {forecast.flops / forecast.devices / 1e12:,.2f} on each device"
    )
    yield from _describe_traffic(forecast)
    yield from _describe_time(forecast)


def _describe_memory(forecast: "Forecast") -> Iterator[str]:
    memory = forecast.memory
    source = "" if forecast.compiled else ", by estimate: not compiled"
    verdict = {True: ": fits", False: ": DOES NOT FIT", None: ""}[forecast.fits]
    room = f" of {forecast.available / _GIB:,.2f}" if forecast.available else ""
    yield (
        f"memory       {memory.total / _GIB:,.2f}{room} GiB a device{verdict} (state"
        f" {memory.state / _GIB:,.2f}, temporaries {memory.temporaries / _GIB:,.2f}"
        f"{source})"
    )
    for number, remedy in enumerate(forecast.remedies):
        yield ("change       " if number == 0 else "or           ") + remedy


def _describe_traffic(forecast: "Forecast") -> Iterator[str]:
    if forecast.collectives is None:
        reason = "too large to compile" if forecast.compiled else "not compiled"
        yield f"collectives  unknown: {reason}"
        return
    for kind, traffic in sorted(forecast.collectives.items()):
        yield (
            f"collectives  {kind}: {traffic.count:,} a step,"
            f" {traffic.payload / 1e6:,.1f} MB; each device sends"
            f" {traffic.sent / 1e6:,.1f} MB"
        )
    if not forecast.collectives:
        yield "collectives  none"
    if forecast.unknown_loops:
        yield (
            f"collectives  at least that: {forecast.unknown_loops} loops, whose trips"
            " the program does not tell, count once"
        )


def _describe_time(forecast: "Forecast") -> Iterator[str]:
    schedule = forecast.schedule
    if schedule is None:
        yield "time         unknown: a CPU has no peak that would be worth a forecast"
        return
    yield (
        f"time         {1e3 * schedule.step_seconds:,.1f} ms a step at"
        f" {forecast.utilization:.0%} of the peak, {schedule.days:,.2f} days for"
        f" {forecast.steps:,} steps"
    )
    yield f"cost         {schedule.chip_hours:,.0f} chip-hours"
    sending = forecast.communication_seconds
    if sending is not None:
        yield (
            f"sending      {1e3 * sending:,.1f} ms a step at the least"
            + (
                f": more than the step; {forecast.utilization:.0%} is out of reach"
                if sending > schedule.step_seconds
                else ""
            )
        )


if __name__ == "__main__":
    run(main)
