"""Files that environments have in common."""

from pathlib import Path

from tests.hardlink import SMALLEST, share


def test_equal_files_become_one(tmp_path: Path) -> None:
    one, two = tmp_path / "one" / "lib", tmp_path / "two" / "lib"
    one.mkdir(parents=True)
    two.mkdir(parents=True)
    large = bytes(SMALLEST)
    for folder, name, content in (
        (one, "same", large),
        (two, "same", large),
        (one, "different", large),
        (two, "different", large[:-1] + b"x"),
        (one, "small", b"x"),
        (two, "small", b"x"),
        (two, "alone", large),
    ):
        (folder / name).write_bytes(content)
    (two / "link").symlink_to(one / "same")
    assert share(tmp_path / "two") == SMALLEST
    linked = [name for name in ("same", "different", "small") if (one / name).samefile(two / name)]
    assert linked == ["same"]
    assert (two / "different").read_bytes()[-1:] == b"x"
    assert (two / "link").is_symlink()
    assert share(tmp_path / "two") == 0
    (two / "same").unlink()  # as pip does
    assert (one / "same").read_bytes() == large
