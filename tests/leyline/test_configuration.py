"""Settings in JSON: what the text says twice has no one value."""

import pytest

from esper.leyline.configuration import read_json, read_setting
from esper.leyline.errors import SettingError

TWICE = ['{"a": 1, "b": 2, "a": 1}', '{"b": {"a": 1, "a": 2}}', '[{"a": 1, "a": 2}]']


@pytest.mark.parametrize("text", TWICE)
def test_a_key_that_is_twice_in_a_file_is_refused(tmp_path, text):
    path = tmp_path / "mine.json"
    path.write_text(text)
    with pytest.raises(
        SettingError, match=r"^\S+mine\.json: the key 'a' is there twice.*Leave one"
    ):
        read_json(path)


@pytest.mark.parametrize("text", TWICE)
def test_a_key_that_is_twice_in_a_setting_is_refused(text):
    with pytest.raises(SettingError, match=r"^the key 'a' is there twice"):
        read_setting(f"task={text}")


def test_a_key_that_is_once_in_each_object_is_read(tmp_path):
    path = tmp_path / "mine.json"
    path.write_text('{"a": {"a": 1}, "b": [{"a": 2}, {"a": 3}]}')
    assert read_json(path) == {"a": {"a": 1}, "b": [{"a": 2}, {"a": 3}]}
    assert read_setting("task=plain text") == ("task", "plain text")
