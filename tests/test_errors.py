"""The launcher knows an error of a service again by its line; what that says: runtime/test_lifecycle.py."""

import functools

from troupe.common.errors import defect_line, sameness


def line_of(call):
    try:
        call()
    except Exception as error:
        return defect_line(error)
    raise AssertionError("it did not fail")


def fails(text):
    raise KeyError(text)


def fails_elsewhere(text):
    raise KeyError(text)


def test_one_error_is_known_again_whatever_it_says():
    line, *same = [line_of(functools.partial(fails, text)) for text in ("x", "a: (b) (my.py:7)", "")]
    others = [line_of(functools.partial(fails_elsewhere, "x")), line_of(functools.partial(divmod, 1, 0))]
    others += [f"internal error, ValueError: {value}" for value in (1, 2)]  # of no line of a user's own
    assert {sameness(each) for each in same} == {sameness(line)}
    assert len({sameness(each) for each in [line, *others]}) == 5
