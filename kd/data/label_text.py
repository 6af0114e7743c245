"""How a label is written. Without torch: the server reads numbers about classes by their labels."""

import re
import unicodedata


def plain_label(given: object) -> str:
    """A label as all sources write it: without blanks around it, whole numbers without a point, in Unicode's form NFC.

    "", for None, NaN and blanks, means no label.

    >>> plain_label(" cat "), plain_label(3.0), plain_label("3.0"), plain_label(None)
    ('cat', '3', '3', '')
    >>> plain_label("cafe" + chr(0x301)) == "caf" + chr(0xE9)
    True
    """
    text = ""
    is_nan = given != given
    if given is not None and not is_nan:
        text = unicodedata.normalize("NFC", str(given)).strip()
    # A table's column of numbers with a missing one.
    whole = re.fullmatch(r"(-?[0-9]{1,18})\.0+", text)
    return whole[1] if whole else text
