"""Private by default: secrets and personal data in sessions are found, counted by kind, and replaced on request.

Design:
    * `SecretScanner` looks at one text: rules for known tokens (`tokens`, by Kingfisher), for what only its place
      makes secret (`patterns`, judged by `values`), for people (`people`), and those of the user (`deny`); also
      where the text is escaped (`escapes`). It returns stretches (`findings`).
    * `Redactor` reads everything first and replaces then, with `placeholders` that are equal for equal text, in values
      of any shape, JSON text included (`json_text`).
    * `dataset` does that for conversations before they are rendered, so that export, rows and training see the same
      redacted text; `rows` reads packed rows once more before they are pushed.
    * `RedactionReport` has the numbers. What was found is in no report, message, exception or file.

Cost: see `scanner`.
"""

from dagpack_hf.redact.dataset import redact_conversations, scan_conversations
from dagpack_hf.redact.deny import deny_patterns
from dagpack_hf.redact.people import home_owner, machine_names
from dagpack_hf.redact.redactor import Redactor, redact_objects, scan_objects
from dagpack_hf.redact.report import RedactionReport
from dagpack_hf.redact.scanner import SecretScanner

__all__ = [
    "RedactionReport",
    "Redactor",
    "SecretScanner",
    "deny_patterns",
    "home_owner",
    "machine_names",
    "redact_conversations",
    "redact_objects",
    "scan_conversations",
    "scan_objects",
]
