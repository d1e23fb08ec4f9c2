"""NCCL settings: from a mapping or a file to what the engine reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from lightning_mcore import MCoreStrategy
from lightning_mcore._mcore import groups
from lightning_mcore.config import ParallelSizes
from lightning_mcore.errors import ConfigurationError
from lightning_mcore.layout import resolve_layout

SETTINGS = {"dp_cp": {"max_ctas": 16, "net_name": "IB"}, "tp": {"is_high_priority_stream": True}}


def test_a_file_is_read_before_anything_runs(tmp_path: Path) -> None:
    path = tmp_path / "nccl.yaml"
    path.write_text(yaml.safe_dump(SETTINGS))
    for given in (path, str(path), SETTINGS):
        strategy = MCoreStrategy(nccl_communicators=given)
        assert strategy._request.switches.nccl_communicators == SETTINGS


@pytest.mark.parametrize(
    ("text", "match"),
    [
        (None, "must be a readable YAML file"),
        ("{", "must be a readable YAML file"),
        ("- dp", "must hold a mapping .* but holds list"),
    ],
)
def test_a_file_that_holds_none_is_refused(tmp_path: Path, text: str | None, match: str) -> None:
    path = tmp_path / "nccl.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigurationError, match=match):
        MCoreStrategy(nccl_communicators=path)


@pytest.mark.parametrize("communicators", [SETTINGS, {}])
def test_the_engine_is_handed_a_file_of_its_own_form(
    communicators: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On CPU groups cannot be made with these; what the engine would read is looked at."""
    seen: dict[str, Any] = {}

    def read(**arguments: Any) -> None:
        path = arguments["nccl_communicator_config_path"]
        seen.update(
            arguments, read=None if path is None else yaml.safe_load(Path(path).read_text())
        )

    monkeypatch.setattr(groups.parallel_state, "initialize_model_parallel", read)
    groups.init_parallel_state(
        resolve_layout(ParallelSizes(tp=2), 4, 0),
        timeout_minutes=3,
        fields={"high_priority_stream_groups": ["dp_cp"]},
        communicators=communicators,
    )
    assert seen["read"] == (communicators or None)
    assert seen["high_priority_stream_groups"] == ["dp_cp"]
    assert seen["tensor_model_parallel_size"] == 2
    if communicators:
        assert not Path(seen["nccl_communicator_config_path"]).exists()
