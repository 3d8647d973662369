"""One start in a process of its own, from its first moment to the first token: run by the startup benchmark.

  python -m launch.benchmarks.startup_probe STARTED_S OPTIONS

STARTED_S is the monotonic clock when the process was made, OPTIONS the engine's configuration as JSON. It does what
`launch.serve` does but for listening, and prints one JSON object: seconds from STARTED_S to the end of each phase.
"""

from __future__ import annotations

import json
import sys
import time

REFUSED = "refused: "
"""Before what a start says that cannot be."""


def main() -> None:
    started_s, options = float(sys.argv[1]), json.loads(sys.argv[2])
    marks = {"interpreter": time.monotonic() - started_s}
    # Here, since they are what is measured.
    from rich.console import Console

    import launch.serve  # noqa: F401
    from launch.console import StageLog
    from launch.flags import StartError
    from launch.startup import shipped_adapters, start_engine
    from plora_jax.engine.build import EngineConfig
    from plora_jax.engine.params import SamplingParams

    class Clock(StageLog):
        """Takes down when a stage ends."""

        def __init__(self) -> None:
            super().__init__(Console(quiet=True))
            self._running: str | None = None

        def end(self, *, failed: bool = False) -> None:
            if self._running is not None:
                marks[self._running] = time.monotonic() - started_s
            self._running = None
            super().end(failed=failed)

        def stage(self, name: str) -> None:
            super().stage(name)
            self._running = name

    marks["imports"] = time.monotonic() - started_s
    config = EngineConfig(**options)
    try:
        deployment = start_engine(config, {}, log=Clock(), shipped=shipped_adapters(config))
    except StartError as error:
        sys.exit(f"{REFUSED}{error}")
    marks["ready"] = time.monotonic() - started_s
    generation = deployment.engine.submit([1, 2, 3], SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True))
    for _ in generation:
        break
    marks["first token"] = time.monotonic() - started_s
    print(json.dumps(marks))
    sys.stdout.flush()
    deployment.engine.shutdown()


if __name__ == "__main__":
    main()
