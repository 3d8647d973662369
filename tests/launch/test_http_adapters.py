"""Adapters over HTTP, and above all what must not be read or named."""

from __future__ import annotations

import builtins
import json
import os
import pathlib
import threading
from collections.abc import Iterator

import pytest
from starlette.testclient import TestClient

from launch.http.adapter_paths import OutsideRootError, name_problem, resolve_inside
from tests.launch.http_rig import REPLY, HttpRig, http_rig, live_server


def make_adapter(path: pathlib.Path, **config: object) -> pathlib.Path:
    path.mkdir(parents=True)
    (path / "adapter_config.json").write_text(json.dumps(config))
    return path


@pytest.fixture
def root(tmp_path: pathlib.Path) -> pathlib.Path:
    make_adapter(tmp_path / "root" / "a")
    make_adapter(tmp_path / "secret")
    return tmp_path / "root"


@pytest.fixture
def rig(root: pathlib.Path) -> Iterator[HttpRig]:
    with http_rig(adapter_root=str(root)) as made:
        yield made


@pytest.fixture
def client(rig: HttpRig) -> TestClient:
    return rig.client()


def load(client: TestClient, name: object, path: object, **more: object):
    return client.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": str(path), **more})


def test_load_serves_lists_and_unloads(client, root):
    response = load(client, "x", "a")
    assert (response.status_code, response.text) == (200, "Success: LoRA adapter 'x' added successfully.")
    card = client.get("/v1/models").json()["data"][1]
    assert (card["id"], card["root"], card["parent"]) == ("x", str(root / "a"), "base")
    answer = client.post("/v1/completions", json={"model": "x", "prompt": "p", "max_tokens": 50}).json()
    assert answer["choices"][0]["text"].endswith("]" + REPLY)
    assert answer["model"] == "x"
    response = client.post("/v1/unload_lora_adapter", json={"lora_name": "x"})
    assert (response.status_code, response.text) == (200, "Success: LoRA adapter 'x' removed successfully.")
    response = client.post("/v1/completions", json={"model": "x", "prompt": "p"})
    assert response.status_code == 404
    assert response.json()["error"]["message"] == "The model `x` does not exist."


def test_adapters_route_shows_where_each_one_is(client):
    load(client, "x", "a")
    (entry,) = client.get("/v1/adapters").json()["data"]
    assert entry["name"] == "x"
    assert (entry["rank"], entry["bytes"], entry["tier"], entry["strategy"]) == (0, 1000, "pool", "resident")
    assert entry["device_bytes"] == 0
    assert (entry["pinned"], entry["in_flight"], entry["last_used_s_ago"]) == (False, 0, None)
    assert 0 <= entry["loaded_s_ago"] < 60
    client.post("/v1/completions", json={"model": "x", "prompt": "p"})
    assert client.get("/v1/adapters").json()["data"][0]["last_used_s_ago"] >= 0


def test_absolute_path_inside_the_root_is_taken(client, root):
    assert load(client, "x", root / "a").status_code == 200


@pytest.mark.parametrize("field", ["lora_name", "lora_path"])
def test_load_with_a_missing_field_is_400(client, field):
    body = {"lora_name": "x", "lora_path": "a"}
    for broken in ({**body, field: ""}, {k: v for k, v in body.items() if k != field}):
        response = client.post("/v1/load_lora_adapter", json=broken)
        assert response.status_code == 400
        assert response.json()["error"]["param"] == field


def test_load_of_a_taken_name_is_400_and_inplace_replaces(client):
    load(client, "x", "a")
    response = load(client, "x", "a")
    assert response.status_code == 400
    assert "'x'" in response.json()["error"]["message"]
    assert load(client, "x", "a", load_inplace=True).status_code == 200


def test_load_of_absent_files_is_404(client, root):
    (root / "empty").mkdir()
    for path in ("nothing", "empty"):
        response = load(client, "x", path)
        assert (response.status_code, response.json()["error"]["param"]) == (404, "lora_path")


def test_load_that_is_refused_says_why_and_frees_the_name(client, root):
    make_adapter(root / "bad", refuse="has rank 128; this server holds rank <= 64: raise --max_lora_rank")
    response = load(client, "x", "bad")
    assert response.status_code == 400
    assert "rank 128" in response.json()["error"]["message"]
    (root / "broken").mkdir()
    (root / "broken" / "adapter_config.json").write_text("{")
    assert load(client, "x", "broken").status_code == 400
    assert client.get("/v1/adapters").json()["data"] == []
    assert load(client, "x", "a").status_code == 200


def test_unload_of_nothing_and_of_an_unknown_name(client):
    assert client.post("/v1/unload_lora_adapter", json={}).status_code == 400
    response = client.post("/v1/unload_lora_adapter", json={"lora_name": "x"})
    assert response.status_code == 404
    assert "'x' cannot be found" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    "name", ["../x", "..", ".", "a/b", "a\\b", "a\0b", "a\nb", " ", "x" * 256, "base", "\x7f", "a\u0085b"]
)
def test_name_that_is_no_name_is_refused(client, name):
    response = load(client, name, "a")
    assert (response.status_code, response.json()["error"]["param"]) == (400, "lora_name")
    assert client.get("/v1/adapters").json()["data"] == []


def test_adapter_name_with_a_comma_is_refused_since_metrics_list_names() -> None:
    assert name_problem("a,b", ("base",)) == (
        "an adapter's name must not hold a comma, got 'a,b': metrics list names with commas between"
    )


def test_ordinary_names_are_fine():
    assert all(name_problem(name, ("base",)) is None for name in ("x", "a.b-c_d:1", "Ünïcode 漢字", "x" * 255))


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Paths that were opened."""
    paths: list[str] = []
    real = builtins.open
    for owner, name in ((builtins, "open"), (pathlib.Path, "open"), (os, "open")):
        original = getattr(owner, name)

        def watch(path, *args, _original=original, **kwargs):
            paths.append(os.path.realpath(path) if isinstance(path, str | os.PathLike) else str(path))
            return _original(path, *args, **kwargs)

        monkeypatch.setattr(owner, name, watch)
    assert real is not builtins.open
    return paths


def outside_paths(root: pathlib.Path) -> list[str]:
    """Ways out of the root; each leads to a good adapter."""
    secret = root.parent / "secret"
    (root / "link").symlink_to(secret)
    (root / "up").symlink_to("..")
    (root / "chain").symlink_to("link")
    half = root / "half"
    half.mkdir()
    (half / "adapter_config.json").symlink_to(secret / "adapter_config.json")
    deep = make_adapter(root / "deep")
    (deep / "inner").mkdir()
    (deep / "inner" / "data").symlink_to(secret)
    behind = make_adapter(root / "behind")
    (behind / "inner").symlink_to(deep / "inner")
    sibling = make_adapter(root.parent / "root-sibling")
    relative = [
        "../secret",
        "a/../../secret",
        "link",
        "chain",
        "up/secret",
        "half",
        "deep",
        "behind",
        "link/../secret",
        "../root-sibling",
    ]
    return [*relative, str(secret), str(sibling), "/etc", "/proc/self/root" + str(secret), "a\0", "..", "/"]


def test_path_that_leads_out_of_the_root_is_refused_and_nothing_there_opened(client, root, opened):
    paths = outside_paths(root)
    opened.clear()
    for path in paths:
        response = load(client, "x", path)
        assert (response.status_code, response.json()["error"]["param"]) == (400, "lora_path"), path
    assert not [p for p in opened if "secret" in p or "sibling" in p or p.startswith("/etc")]
    assert client.get("/v1/adapters").json()["data"] == []
    load(client, "x", "a")
    assert str(root / "a" / "adapter_config.json") in opened, "the watch is blind"


def test_path_that_is_not_unicode_or_very_long_says_so_in_a_line(client):
    for path, says in (
        ("\\ud800", "lora_path is refused: the path is not valid Unicode: lone surrogate U+D800."),
        ("b" * 3000, f"no adapter directory at '{'b' * 100}... (3000 characters)'."),
    ):
        body = f'{{"lora_name": "odd", "lora_path": "{path}"}}'
        response = client.post("/v1/load_lora_adapter", content=body, headers={"Content-Type": "application/json"})
        error = response.json()["error"]
        assert (error["param"], error["message"].endswith(says)) == ("lora_path", True), error


def test_unload_of_a_name_that_no_answer_can_hold_is_404(client):
    body, headers = '{"lora_name": "\\ud800"}', {"Content-Type": "application/json"}
    response = client.post("/v1/unload_lora_adapter", content=body, headers=headers)
    assert response.status_code == 404
    assert response.json()["error"]["message"] == "The lora adapter '\\ud800' cannot be found."


def test_path_outside_says_the_same_whether_it_exists(client):
    there, absent = load(client, "x", "../secret"), load(client, "x", "../secrex")
    assert there.json()["error"]["message"].replace("secret", "secrex") == absent.json()["error"]["message"]


def test_link_inside_the_root_is_followed(client, root):
    (root / "alias").symlink_to("a")
    assert load(client, "x", "alias").status_code == 200
    assert client.get("/v1/models").json()["data"][1]["root"] == str(root / "a")


def test_without_a_root_no_path_is_taken(root):
    with http_rig() as rig:
        response = load(rig.client(), "x", root / "a")
    assert response.status_code == 400
    assert "--adapter_root" in response.json()["error"]["message"]


def test_model_card_of_an_adapter_was_created_when_it_was_loaded(root):
    with http_rig(adapter_root=str(root)) as rig:
        client = rig.client()
        rig.state.created = 1000
        for start, options in ((2000, {}), (3000, {"load_inplace": True})):
            rig.state.epoch_s = start - rig.engine.clock.now()
            assert load(client, "x", "a", **options).status_code == 200
            base, adapter = client.get("/v1/models").json()["data"]
            assert base["created"] == 1000
            assert start <= adapter["created"] < start + 60


def test_root_that_is_a_link_itself_works(root, tmp_path):
    (tmp_path / "rootlink").symlink_to(root)
    assert resolve_inside(str(tmp_path / "rootlink"), "a") == str(root / "a")
    with pytest.raises(OutsideRootError, match="does not resolve inside"):
        resolve_inside(str(tmp_path / "rootlink"), "../secret")


@pytest.mark.parametrize(
    ("options", "there"),
    [
        ({"host": "127.0.0.1"}, True),
        ({"host": "localhost"}, True),
        ({"host": "::1"}, True),
        ({"host": "0.0.0.0"}, False),
        ({"host": "10.0.0.1"}, False),
        ({"host": "127.0.0.1", "adapter_routes": False}, False),
        ({"host": "0.0.0.0", "adapter_routes": True}, True),
    ],
)
def test_adapter_routes_default_to_the_loopback_host(root, options, there):
    with http_rig(adapter_root=str(root), **options) as rig:
        client = rig.client()
        assert (load(client, "x", "a").status_code == 200) is there
        assert client.get("/v1/adapters").status_code == 200


def test_streams_go_on_while_an_adapter_loads_and_the_name_loads_once(rig, root):
    reading, go_on = threading.Event(), threading.Event()
    read = rig.engine._read_adapter

    def slow_read(name, path):
        reading.set()
        assert go_on.wait(10)
        return read(name, path)

    rig.engine._read_adapter = slow_read
    with live_server(rig.state) as live, live.openai() as client:
        status: list[int] = []
        body = {"lora_name": "x", "lora_path": "a"}
        post = client._client.post
        thread = threading.Thread(
            target=lambda: status.append(post(f"{live.url}/v1/load_lora_adapter", json=body).status_code)
        )
        thread.start()
        assert reading.wait(10)
        second = post(f"{live.url}/v1/load_lora_adapter", json=body)
        assert second.status_code == 400
        assert "being loaded" in second.json()["error"]["message"]
        assert client.completions.create(model="base", prompt="p", max_tokens=50).choices[0].text == REPLY
        go_on.set()
        thread.join(10)
        assert status == [200]
        assert client.completions.create(model="x", prompt="p", max_tokens=50).choices[0].text.endswith(REPLY)


def test_unload_while_a_stream_runs_lets_it_end_and_refuses_new_requests(rig, root):
    rig.slow_down(0.01)
    with live_server(rig.state) as live, live.openai() as client:
        client._client.post(f"{live.url}/v1/load_lora_adapter", json={"lora_name": "x", "lora_path": "a"})
        stream = client.completions.create(model="x", prompt="p", max_tokens=50, stream=True)
        text = next(stream).choices[0].text
        client._client.post(f"{live.url}/v1/unload_lora_adapter", json={"lora_name": "x"})
        refused = client._client.post(f"{live.url}/v1/completions", json={"model": "x", "prompt": "p"})
        assert refused.status_code == 404
        chunks = list(stream)
        assert (text + "".join(c.choices[0].text for c in chunks)).endswith("]" + REPLY)
        assert chunks[-1].choices[0].finish_reason == "stop"
    assert not rig.engine.adapters()
