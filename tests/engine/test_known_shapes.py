import pytest

from deepthin.engine.errors import UsageError
from deepthin.engine.known_shapes import known_shape, known_shapes, nearest_known


@pytest.mark.parametrize("name", known_shapes())
def test_computed_parameters_match_the_published_ones(name: str) -> None:
    known = known_shape(name)
    assert known.params == pytest.approx(known.published_params, rel=0.002)


def test_every_row_names_its_source_and_certainty() -> None:
    for known in known_shapes().values():
        assert known.source
        assert known.verified in ("file", "partly", "arith")
        assert known.name == known.name.lower()


def test_exact_parameters_of_smollm2() -> None:
    assert known_shape("SmolLM2-135M").params == 134_515_008


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(UsageError, match=r"'smollm3' is unknown; known are .*smollm2-135m"):
        known_shape("smollm3")


def test_nearest_by_ratio_among_those_the_engine_runs() -> None:
    assert nearest_known(133_000_000).name == "smollm2-135m"
    assert nearest_known(1_000).name == "monad"
    assert nearest_known(495_000_000).accounting_only == ""
