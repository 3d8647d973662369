"""Why adapters are served as they are: the route, the command, and pinned adapters over HTTP."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from prometheus_client.parser import text_string_to_metric_families

from launch.explain import ExplainConfig, explain
from launch.flags import StartError
from plora_jax.engine.placement import PlanExplanation, Turn
from tests.launch.http_rig import HttpRig, http_rig, live_server
from tests.launch.test_http_adapters import load, make_adapter


class Reasons:
    def short(self, adapter_id: int) -> str:
        return "because"

    def long(self, adapter_id: int, name: str) -> PlanExplanation | None:
        if name == "new":
            return None
        return PlanExplanation(f"adapter {name!r}: because\nof this", {"adapter": name, "reason": "because"})


class Planner:
    """Plans nothing and has its reasons."""

    plans_adapters = True

    def between_steps(self, running: object) -> Turn:
        return Turn(0, 0.25 if running else None)

    def observe(self, plan: object) -> None:
        """Learns nothing."""

    def reasons(self) -> Reasons:
        return Reasons()

    def close(self) -> None:
        """Has nothing."""


@pytest.fixture
def rig(tmp_path) -> Iterator[HttpRig]:
    make_adapter(tmp_path / "a")
    with http_rig(planner=Planner(), adapter_root=str(tmp_path)) as made:
        yield made


def test_adapters_route_has_the_reason_and_what_is_pinned(rig):
    client = rig.client()
    load(client, "x", "a", pinned=True)
    load(client, "y", "a")
    data = client.get("/v1/adapters").json()["data"]
    assert [(card["name"], card["pinned"], card["reason"]) for card in data] == [
        ("x", True, "because"),
        ("y", False, "because"),
    ]
    families = text_string_to_metric_families(client.get("/metrics").text)
    loaded = {
        sample.labels["adapter_name"]: sample.labels["pinned"]
        for family in families
        for sample in family.samples
        if sample.name == "plora:adapter_loaded"
    }
    assert loaded == {"x": "true", "y": "false"}


def test_pinned_that_is_no_boolean_is_400(rig):
    assert load(rig.client(), "x", "a", pinned="perhaps").status_code == 400


def test_plans_are_counted_by_what_they_took(rig):
    client = rig.client()
    client.post("/v1/completions", json={"prompt": "abc", "max_tokens": 4})
    assert 'plora:planner_seconds_sum{model_name="base"} 0.' in client.get("/metrics").text


def test_explain_route_answers_in_json_and_text(rig):
    client = rig.client()
    load(client, "x", "a")
    answer = client.get("/v1/adapters/x/explain")
    assert answer.json() == {"object": "adapter.explanation", "adapter": "x", "reason": "because"}
    answer = client.get("/v1/adapters/x/explain", params={"format": "text"})
    assert answer.text == "adapter 'x': because\nof this\n"
    assert answer.headers["content-type"].startswith("text/plain")
    assert client.get("/v1/adapters/x/explain", params={"format": "pdf"}).status_code == 400


def test_explain_route_of_what_is_unknown_or_not_planned_says_so(rig):
    client = rig.client()
    answer = client.get("/v1/adapters/x/explain")
    assert (answer.status_code, answer.json()["error"]["message"]) == (404, "The lora adapter 'x' cannot be found.")
    load(client, "new", "a")
    answer = client.get("/v1/adapters/new/explain")
    assert answer.status_code == 409
    assert "no plan has been made since adapter 'new' was loaded" in answer.json()["error"]["message"]


def test_explain_command_prints_what_the_server_says(rig):
    load(rig.client(), "x", "a")
    with live_server(rig.state) as live:
        assert explain(ExplainConfig(adapter="x", url=live.url + "/")) == "adapter 'x': because\nof this\n"
        with pytest.raises(StartError, match=r"answers 404: The lora adapter 'z ä' cannot be found\."):
            explain(ExplainConfig(adapter="z ä", url=live.url))


def test_explain_command_sends_the_key(tmp_path):
    make_adapter(tmp_path / "a")
    with (
        http_rig(planner=Planner(), api_key="secret") as rig,
        live_server(rig.state) as live,
    ):
        rig.engine.load_adapter("x", str(tmp_path / "a"))
        assert explain(ExplainConfig(adapter="x", url=live.url, api_key="secret")).startswith("adapter 'x'")
        with pytest.raises(StartError, match="answers 401"):
            explain(ExplainConfig(adapter="x", url=live.url))


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({}, "--adapter is missing: name a loaded adapter"),
        ({"adapter": "x", "url": "localhost:8000"}, "must begin with http:// or https://"),
        ({"adapter": "x", "url": "http://127.0.0.1:1"}, "no server answers at http://127.0.0.1:1: .* set --url"),
    ],
)
def test_explain_command_that_cannot_ask_says_what_to_change(config, says):
    with pytest.raises(StartError, match=says):
        explain(ExplainConfig(**config))
