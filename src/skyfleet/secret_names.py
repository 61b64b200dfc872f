"""Which names hold secrets: api_key, DB_PASSWORD, PGPASSWORD, X-Auth-Token."""

from __future__ import annotations

import re
from functools import lru_cache
from itertools import pairwise

_SECRET = re.compile(
    # Also without a separator: PGPASSWORD, dbpassword, SSHPASS, privatekey.
    r"\w*(?:password|passwd|passphrase|passcode|secret)s?|(?!oldpwd)\w*pwd|"
    "(?:ssh|db|user|root|admin|smtp|mail|imap|pop|my|pg|sql|mysql|redis|mongo|rabbit|ftp|sftp|http|"
    "proxy|ldap|login|sudo|git|vnc|wifi|key|keystore|truststore)pass|"
    "(?:api|auth|access|bot|refresh|bearer|hf|gh|github)tokens?|"
    "(?:api|auth|access|private|secret|ssh|encryption|signing|account|master)keys?|"
    "token|authorization|auth|credentials?|cookies?|bearer|signature|sig|jwt"
)
_LABEL = re.compile(
    "file|path|dir|folder|url|uri|ids?|names?|count|limit|length|len|size|budget|type|ttl|seconds|"
    "mode|index|level|method|scheme|sock|socket|variable|var"
)
"""The last word of a name that holds no secret, such as password_file."""
_MODEL_TOKEN = re.compile(
    "eos|bos|pad|unk|sep|cls|mask|stop|image|video|audio|start|end|special|think|first|last|next|"
    "new|begin|tool|decoder|prompt|per"
)
"""What stands before `token` in the vocabulary of a model, such as eos_token."""
_ACCESS = re.compile(
    "api|auth|oauth|access|bearer|refresh|secret|bot|csrf|personal|deploy|registry|github|gh|"
    "gitlab|hf|slack|wandb|openai"
)
"""What stands before `tokens` that are secrets; others, such as max_tokens, are counted."""
_DATA_KEY = re.compile(
    "task|env|data|group|sort|primary|foreign|partition|lookup|answer|prompt|label|dict|row|cache|"
    "index|reward|public|value|input|output|image|target|message|metric|column|field|set"
)
"""What stands before `key` in a name of data, such as task_key."""
_NOT_A_PASSWORD = re.compile(
    "to|forward|backward|must|should|may|did|does|tests?|checks?|single|multi|one|two|first|second|"
    "third|last|next|per|n|num|no|by|all|any|each|if|on|min|max|low|high|band|full|partial|eval|"
    "allow|can|will|is|has|render|build|final|warmup"
)
"""What stands before `pass` that is a success or a repetition, such as fail_to_pass."""
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")


@lru_cache(maxsize=4096)  # the names may come from a hostile text
def looks_secret(name: str) -> bool:
    """Whether a value of this name is a secret: api_key, DB_PASSWORD, X-Auth-Token."""
    words = [word.lower() for word in _WORD.findall(name)]
    if not words or _LABEL.fullmatch(words[-1]):
        return False
    before = words[-2] if len(words) > 1 else ""
    match words[-1]:
        case "token":
            return not _MODEL_TOKEN.fullmatch(before)
        case "tokens":
            return bool(_ACCESS.fullmatch(before))
        case "key" | "keys":
            return not _DATA_KEY.fullmatch(before)
        case "pass":
            return not _NOT_A_PASSWORD.fullmatch(before)
        case "pw":
            return True
    # Also with a suffix: WANDB_API_KEY_TOOL_USE.
    return ("api", "key") in pairwise(words) or any(map(_SECRET.fullmatch, words))
