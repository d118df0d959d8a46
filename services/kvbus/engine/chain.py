"""Digest chain over token ids: how far two token lists agree, block by block, without sending a token.

Link i is a digest of link i-1 and of the tokens of block i, under the conversation's key; a partly filled last block
has a link of its own. Equal links mean equal tokens from the start up to the end of that block.
"""

from array import array
from collections.abc import Sequence
from hashlib import blake2b

LINK_BYTES = 8
TOKEN_BYTES = 4


def chain_of(conversation: str, tokens: Sequence[int], block_size: int) -> list[bytes]:
    """One link per full block, and one for the tail if there is one."""
    data, step, key = _bytes_of(tokens), block_size * TOKEN_BYTES, conversation.encode()
    links: list[bytes] = []
    link = b""
    for start in range(0, len(data), step):
        link = _link(key, link, data[start : start + step])
        links.append(link)
    return links


def tokens_in_common(
    conversation: str, chain: Sequence[bytes], token_count: int, block_size: int, tokens: Sequence[int]
) -> int:
    """How many leading `tokens` are the chain's: whole blocks, or all `token_count` when the tail agrees too."""
    data, key = _bytes_of(tokens[:token_count]), conversation.encode()
    link, common = b"", 0
    for expected in chain:
        end = min(common + block_size, token_count)
        if end * TOKEN_BYTES > len(data) or end == common:
            return common
        link = _link(key, link, data[common * TOKEN_BYTES : end * TOKEN_BYTES])
        if link != expected:
            return common
        common = end
    return common


def _bytes_of(tokens: Sequence[int]) -> bytes:
    return array("I", tokens).tobytes()


def _link(key: bytes, before: bytes, tokens: bytes) -> bytes:
    return blake2b(before + tokens, digest_size=LINK_BYTES, key=key).digest()
