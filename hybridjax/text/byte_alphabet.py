"""GPT-2's alphabet: the characters by which byte-level tokenizers spell bytes."""


def _byte_of_char() -> dict[str, int]:
    """Printable Latin-1 is itself, the rest is moved up from U+0100."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [byte for byte in range(256) if byte not in plain]
    return {chr(b): b for b in plain} | {chr(0x100 + i): b for i, b in enumerate(moved)}


BYTE_OF_CHAR = _byte_of_char()
