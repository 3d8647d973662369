"""Time of a step divided: nested operations, several threads, names of fusions, and parts."""

from __future__ import annotations

import pytest

from launch.benchmarks.step_parts import part_of
from launch.benchmarks.trace_events import Event, Segment, divide, innermost, operation_names

HLO = """HloModule jit_step

%fused_computation.1 (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  ROOT %mul.3 = f32[8]{0} multiply(%p, %p), metadata={op_name="jit(step)/layers/while/body/norm/mul"}
}

ENTRY %main.9 (a: f32[8]) -> f32[8] {
  %a = f32[8]{0} parameter(0), metadata={op_name="a"}
  %fusion.1 = f32[8]{0} fusion(%a), kind=kLoop, calls=%fused_computation.1
  %ffi_call.2 = f32[8]{0} custom-call(%fusion.1), metadata={op_name="jit(step)/layers/while/body/qkv/ffi_call"}
  ROOT %copy.4 = f32[8]{0} copy(%ffi_call.2)
}
"""


def test_operations_have_the_names_around_them_and_fusions_those_of_what_is_inside():
    assert operation_names(HLO) == {
        "p": "",
        "mul.3": "jit(step)/layers/while/body/norm/mul",
        "a": "a",
        "fusion.1": "jit(step)/layers/while/body/norm/mul",
        "ffi_call.2": "jit(step)/layers/while/body/qkv/ffi_call",
        "copy.4": "",
    }


def test_nested_events_are_cut_into_what_is_innermost():
    events = [Event("outer", 0, 10), Event("a", 1, 4), Event("deep", 2, 3), Event("b", 4, 6), Event("later", 12, 13)]
    assert list(innermost(events)) == [
        Segment(0, 1, "outer"),
        Segment(1, 2, "a"),
        Segment(2, 3, "deep"),
        Segment(3, 4, "a"),
        Segment(4, 6, "b"),
        Segment(6, 10, "outer"),
        Segment(12, 13, "later"),
    ]


def test_every_moment_counts_once_for_operations_before_loops_before_the_host():
    segments = [
        Segment(0, 20, "plora.results"),
        Segment(2, 10, "while.1"),
        Segment(4, 8, "x"),
        Segment(6, 8, "y"),
        Segment(9, 12, "x"),
        Segment(30, 40, "x"),
    ]
    found = divide(
        segments,
        Event("step", 1, 22),
        operations={"while.1": "loop", "x": "X", "y": "Y"},
        host={"plora.results": "wait"},
    )
    # x alone in 4..6 and 9..12, x and y in 6..8, the loop in 2..4 and 8..9, the host in 1..2 and 12..20, nobody after.
    assert found == pytest.approx({"X": 6.0, "Y": 1.0, "loop": 3.0, "wait": 9.0, "": 2.0})
    assert sum(found.values()) == pytest.approx(21.0)


@pytest.mark.parametrize(
    ("operation", "names", "part"),
    [
        ("ffi_call.2", "jit(step)/layers/while/body/closed_call/gate_up/ffi_call", "gate_up"),
        (
            "cond.3",
            "jit(step)/layers/while/body/closed_call/gate_up/decode.any/cond/decode.resident/x",
            "decode adapters",
        ),
        ("cond.3", "jit(step)/head/head.any/cond", "head adapters"),
        ("f", "jit(step)/layers/while/body/decode.attention/decode.local/cond", "decode.attention"),
        ("add.7", "jit(step)/layers/while/body/closed_call/add", "layers: add"),
        ("add_convert_fusion.2", "jit(step)/layers/while/body/closed_call", "layers: add_convert_fusion"),
        ("copy.160", "", "unnamed: copy"),
        ("wrapped_reduce-window.5.clone.1", "", "unnamed: wrapped_reduce-window"),
        ("s", "jit(step)/prompt_logprobs/cond", "prompt_logprobs"),
    ],
)
def test_part_is_the_innermost_name_that_is_known(operation, names, part):
    assert part_of(operation, names) == part
