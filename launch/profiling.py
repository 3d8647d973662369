"""Traces of a few steps, for people to look at and for `bench latency --breakdown` to add up.

    keep_names_in_programs()                                   # before the engine is built
    StepProfiler(directory, steps=20).watch(deployment.executor)

The profiler starts before a step of traffic and stops after so many more; traffic waits meanwhile while the file is
written, some seconds. Programs and the host's parts of a step carry names (`plora_jax.model.scopes`,
`plora_jax.engine.annotations`).
"""

from __future__ import annotations

import dataclasses
import logging
import pathlib
from collections.abc import Callable

import jax

from launch.flags import StartError
from plora_jax.engine.executor import JaxExecutor
from plora_jax.engine.plan import StepPlan

logger = logging.getLogger(__name__)

HOW_TO_OPEN = (
    "open the .trace.json.gz in it at https://ui.perfetto.dev, or see it by program and operation: "
    "pip install xprof; xprof --port=6006"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProfileConfig:
    """What is traced.

    Attributes:
        profile_dir: write a trace of the first steps of traffic to this directory, made where it is missing; the steps
            are slower meanwhile and none is begun before the last one has ended, and traffic waits some seconds while
            the file is written.
        profile_steps: steps in the trace of --profile_dir.
    """

    profile_dir: str | None = None
    profile_steps: int = 20

    def problems(self) -> list[str]:
        """What cannot be, empty when all can."""
        found = []
        if self.profile_steps < 1:
            found.append(f"--profile_steps must be at least 1, got {self.profile_steps}")
        path = self.profile_dir and pathlib.Path(self.profile_dir).expanduser()
        if path and path.exists() and not path.is_dir():
            found.append(f"--profile_dir {self.profile_dir!r} is not a directory: name one, or one that is to be made")
        return found


NO_PROFILE = ProfileConfig()


def make_directory(directory: str | pathlib.Path) -> None:
    """Makes the directory of traces where it is missing.

    Raises:
        StartError: it cannot be made.
    """
    try:
        pathlib.Path(directory).expanduser().mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StartError(f"--profile_dir {str(directory)!r} cannot be made: {error}") from error


class StepProfiler:
    """Traces steps of an engine, which follow one another as long as it is `JaxExecutor.on_step`.

    Args:
        directory: where the trace goes.
        steps: whole steps in it at most.
        wanted: it begins with the first step of which this is true, and ends before the next of which it is not.
        take: told each plan whose step is whole in the trace, in order.
        on_done: told the directory when the trace is written.

    Raises:
        StartError: the directory cannot be made.
    """

    def __init__(
        self,
        directory: str | pathlib.Path,
        *,
        steps: int,
        wanted: Callable[[StepPlan], bool] = lambda plan: True,
        take: Callable[[StepPlan], None] = lambda plan: None,
        on_done: Callable[[pathlib.Path], None] = lambda path: None,
    ) -> None:
        self._directory, self._left = pathlib.Path(directory).expanduser(), steps
        self._wanted, self._take, self._on_done = wanted, take, on_done
        self._running = self._done = False
        make_directory(directory)

    def watch(self, executor: JaxExecutor) -> None:
        """Is told of the executor's steps until the trace is written."""

        def tell(plan: StepPlan) -> None:
            self(plan)
            if self._done:
                executor.on_step = None

        executor.on_step = tell

    def __call__(self, plan: StepPlan) -> None:
        """Takes note of a step that is about to be carried out, in the thread that steps."""
        if self._done:
            return
        wanted = self._wanted(plan)
        if not self._running:
            if wanted:
                # The step has begun already: only those after it are whole.
                self.start()
        elif not wanted or not self._left:
            self.close()
        else:
            self._left -= 1
            self._take(plan)

    def start(self) -> None:
        """Begins already now, so that the first step is whole; the engine must not step meanwhile but from here."""
        options = jax.profiler.ProfileOptions()
        # Python's own calls are thousands a step, and tell nothing that the annotations do not.
        options.python_tracer_level = 0
        try:
            jax.profiler.start_trace(self._directory, profiler_options=options)
        except RuntimeError as error:
            logger.warning("no trace is written to %s: %s", self._directory, error)
            self._done = True
            return
        self._running = True

    def close(self) -> None:
        """Writes what is traced so far, if anything; the engine must not step meanwhile but from here."""
        if self._running:
            jax.profiler.stop_trace()
            self._running, self._done = False, True
            self._on_done(self._directory)


def keep_names_in_programs() -> None:
    """Has the cache of compiled programs tell those with other names of operations apart; before they are compiled.

    Otherwise a program may come from the cache with the names, or without any, that it was first compiled with.

    Mutates:
        The process-wide JAX configuration.
    """
    jax.config.update("jax_compilation_cache_include_metadata_in_key", True)
