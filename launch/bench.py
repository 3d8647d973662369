"""Measures this system on a stated case and prints the figures with the hardware and the command that gave them.

  python -m launch.bench BENCHMARK [flags]
  python -m launch.bench BENCHMARK --help

Benchmarks:
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from launch import flags
from launch.benchmarks import first_use, latency, memory, planning, policies, quality, startup, strategies, throughput
from launch.benchmarks.peers import command as peers


class Benchmark(NamedTuple):
    """One benchmark.

    Attributes:
        summary: one line for the list of benchmarks.
        guide: text over the flags in its --help.
        define_flags: defines its flags.
        main: runs it as the flags say.
    """

    summary: str
    guide: str | None
    define_flags: Callable[[], None]
    main: Callable[[], int]


BENCHMARKS: Mapping[str, Benchmark] = {
    "throughput": Benchmark(
        "output tokens/s, TTFT and ITL of a case, in this process or of a server",
        throughput.__doc__,
        throughput.define_flags,
        throughput.main,
    ),
    "latency": Benchmark(
        "a decode step, ITL and TTFT by batch size and adapters; --breakdown says where the time of a step goes",
        latency.__doc__,
        latency.define_flags,
        latency.main,
    ),
    "memory": Benchmark(
        "what adapters in the pool cost: memory by their number, and the time of a step that does not use them",
        memory.__doc__,
        memory.define_flags,
        memory.main,
    ),
    "first_use": Benchmark(
        "time to the first token of an adapter that was never loaded, beside one that is in the pool",
        first_use.__doc__,
        first_use.define_flags,
        first_use.main,
    ),
    "quality": Benchmark(
        "what bfloat16, int8 weights and int8 KV cost in quality: perplexity on a text against float32",
        quality.__doc__,
        quality.define_flags,
        quality.main,
    ),
    "peers": Benchmark(
        "this system and its peers (PEFT, vLLM, OpenVINO GenAI, llama.cpp) side by side on one case, with ratios",
        peers.__doc__,
        peers.define_flags,
        peers.main,
    ),
    "startup": Benchmark(
        "from a new process to its first token, phase by phase, with a cold and with a warm cache",
        startup.__doc__,
        startup.define_flags,
        startup.main,
    ),
    "strategies": Benchmark(
        "time and link bytes of the LoRA strategies, near-data functions against the memory's rate",
        strategies.__doc__,
        strategies.define_flags,
        strategies.main,
    ),
    "policies": Benchmark(
        "mean decode latency of every policy over many adapters, under uniform, skewed and drifting traffic",
        policies.__doc__,
        policies.define_flags,
        policies.main,
    ),
    "planning": Benchmark(
        "how long plans over many adapters take: a full search, and one from where the last plan stood",
        planning.__doc__,
        planning.define_flags,
        planning.main,
    ),
}


def usage() -> str:
    """What --help says without a benchmark."""
    width = max(map(len, BENCHMARKS))
    return f"{__doc__}  " + "\n  ".join(f"{name:<{width}}  {b.summary}" for name, b in BENCHMARKS.items())


def choose(arguments: Sequence[str]) -> Benchmark | str:
    """The benchmark that a command line names, or what is wrong with it.

    Args:
        arguments: without the program's name.
    """
    known = ", ".join(BENCHMARKS)
    if not arguments or arguments[0].startswith("-"):
        return f"the benchmark must come first: python -m launch.bench BENCHMARK [flags], with one of {known}"
    return BENCHMARKS.get(arguments[0]) or f"unknown benchmark {arguments[0]!r}: choose {known}"


def cli() -> None:
    arguments = sys.argv[1:]
    if arguments[:1] in (["--help"], ["-h"], ["help"], ["-help"]):
        print(usage())
        return
    chosen = choose(arguments)
    if isinstance(chosen, str):
        print(f"error: {chosen}", file=sys.stderr)
        sys.exit(2)
    del sys.argv[1]
    # absl shows this text over the flags.
    sys.modules["__main__"].__doc__ = chosen.guide
    chosen.define_flags()
    flags.run(chosen.main)


if __name__ == "__main__":
    cli()
