from __future__ import annotations

import pytest

from dynamo.health_check import (
    HEALTH_CHECK_KEY,
    HealthCheckPayload,
    load_health_check_from_env,
)


class Probe(HealthCheckPayload):
    def __init__(self, payload) -> None:
        self.default_payload = payload
        super().__init__()


@pytest.fixture(autouse=True)
def no_payload(monkeypatch):
    monkeypatch.delenv("DYN_HEALTH_CHECK_PAYLOAD", raising=False)


def test_the_key_is_the_published_one():
    assert HEALTH_CHECK_KEY == "_HEALTH_CHECK"


@pytest.mark.parametrize(
    ("text", "payload"), [("", None), ("{}", {}), ('{"a": 1}', {"a": 1})]
)
def test_good_texts(text, payload, monkeypatch, caplog):
    monkeypatch.setenv("MINE", text)
    assert load_health_check_from_env("MINE") == payload
    assert not caplog.records


def test_a_variable_that_is_not_set_gives_nothing(caplog):
    assert load_health_check_from_env() is None
    assert not caplog.records


@pytest.mark.parametrize(
    "text", ["[1]", "5", "null", "not json", "@", "@/nowhere/at/all", "@."]
)
def test_bad_texts_warn_and_give_nothing(text, monkeypatch, caplog):
    monkeypatch.setenv("MINE", text)
    assert load_health_check_from_env("MINE") is None
    (record,) = caplog.records
    assert (record.levelname, record.name) == ("WARNING", "dynamo.health_check")
    assert "MINE" in record.getMessage()


def test_a_file_is_read(monkeypatch, tmp_path):
    file = tmp_path / "payload.json"
    file.write_text('{"from": "é"}', encoding="utf-8")
    monkeypatch.setenv("DYN_HEALTH_CHECK_PAYLOAD", f"@{file}")
    assert load_health_check_from_env() == {"from": "é"}


def test_a_file_that_is_not_utf8_warns(monkeypatch, tmp_path, caplog):
    file = tmp_path / "payload.json"
    file.write_bytes(b'{"a": "\xff"}')
    monkeypatch.setenv("MINE", f"@{file}")
    assert load_health_check_from_env("MINE") is None
    assert len(caplog.records) == 1


def test_without_a_default_there_is_no_payload():
    with pytest.raises(NotImplementedError, match="default_payload"):
        HealthCheckPayload()


def test_the_environment_wins_at_the_first_use_and_is_kept(monkeypatch):
    default = {"a": 1}
    assert Probe(default).to_dict() is default
    probe = Probe(default)
    monkeypatch.setenv("DYN_HEALTH_CHECK_PAYLOAD", '{"b": 2}')
    assert probe.to_dict() == {"b": 2}
    assert repr(probe) == "Probe(payload={'b': 2})"
    monkeypatch.setenv("DYN_HEALTH_CHECK_PAYLOAD", "{}")
    assert probe.to_dict() == {"b": 2}
    assert Probe(default).to_dict() is default
