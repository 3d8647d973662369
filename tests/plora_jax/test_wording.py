import pytest

from plora_jax.wording import in_json, shortened


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "null"),
        (True, "true"),
        (("",), '[""]'),
        ({1: 1000.0}, '{"1": 1000.0}'),
        ("ü", '"ü"'),
        ("\ud800", r'"\ud800"'),
        (-1.5, "-1.5"),
        ("a" * 200, '"' + "a" * 99 + "... (202 characters)"),
    ],
)
def test_in_json_shows_a_value_as_a_client_wrote_it(value, text):
    assert in_json(value) == text


def test_shortened_keeps_what_fits_and_says_how_long_the_rest_was():
    assert shortened("a" * 100) == "a" * 100
    assert shortened("a" * 101) == "a" * 100 + "... (101 characters)"
