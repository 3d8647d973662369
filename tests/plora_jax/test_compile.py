import logging

import jax

from plora_jax.engine.compile import use_persistent_cache


def test_cache_directory_that_cannot_be_written_warns_and_changes_nothing(tmp_path, caplog):
    before = jax.config.jax_compilation_cache_dir
    (tmp_path / "file").write_text("")
    with caplog.at_level(logging.WARNING):
        assert not use_persistent_cache(tmp_path / "file" / "cache")
    assert "compiled programs are not kept" in caplog.text
    assert "set --compilation_cache_dir" in caplog.text
    assert jax.config.jax_compilation_cache_dir == before
