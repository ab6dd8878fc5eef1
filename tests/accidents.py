"""Bytes with accidents: what no client sends."""

import random


def mutated(data: bytes, chance: random.Random) -> bytes:
    """The same bytes with a few accidents; sometimes with none, or all made up."""
    if chance.random() < 0.05:
        return chance.randbytes(chance.randrange(200))
    found = bytearray(data)
    for _ in range(chance.choice((0, 1, 1, 1, 2, 3, 8))):
        at = chance.randrange(len(found) + 1)
        accident = chance.randrange(6)
        if accident == 0 and found:
            found[at % len(found)] = chance.randrange(256)
        elif accident == 1:
            del found[at : at + chance.randrange(1, 8)]
        elif accident == 2:
            found[at:at] = chance.randbytes(chance.randrange(1, 8))
        elif accident == 3 and found:
            found[at % len(found)] ^= 1 << chance.randrange(8)
        elif accident == 4:
            found[at:at] = found[at : at + chance.randrange(1, 40)]
        else:  # a varint as large as they get
            found[at:at] = b"\xff" * 9 + b"\x01"
    return bytes(found)
