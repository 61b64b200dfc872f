"""Error messages of external services, and final messages of agents, for the labelled set.

The second list of each pair was written after the classification rules and is only used in the
held-out part of the set.
"""

from __future__ import annotations

from skyfleet.analysis.failure_class import FailureClass

LIMIT = (
    (
        "429 Too Many Requests",
        "Error: rate limit exceeded, retry after 30 s",
        '{"error": {"code": 429, "message": "Rate limit reached for requests"}}',
        "Error executing tool: timed out after 60 seconds",
        "ThrottlingException: Rate exceeded",
        "API rate limit exceeded for user ID 1841.",
        "You have exceeded a secondary rate limit. Please wait a few minutes before you try again.",
        "504 Gateway Time-out",
        "httpx.ReadTimeout: The read operation timed out",
        "The server is busy. Please try again later.",
    ),
    (
        "HTTP 429",
        "MCP server rate limit exceeded, come back in 10 minutes",
        "Request was throttled. Expected available in 41 seconds.",
        "context deadline exceeded (Client.Timeout exceeded while awaiting headers)",
        "You are sending messages too quickly; please slow down",
        "ETIMEDOUT",
        "Daily allowance used up for this workspace",
    ),
)
UNAUTHORISED = (
    (
        "403 Forbidden",
        "Permission denied: you cannot edit this record",
        "401 Unauthorized",
        "You are not authorized to perform this action",
        "Access denied for this user",
        "Resource not accessible by integration",
        "This app hasn't been granted all required scopes to make this call.",
        "Insufficient privileges to complete the operation.",
        "ErrorAccessDenied: Access is denied. Check credentials and try again.",
        "Your account doesn't have the rights for this",
    ),
    (
        "The caller does not have permission",
        "The remote server returned an error: (403) Forbidden.",
        "Only the author of a story can move it",
        "This operation requires administrator consent",
        "You need to be logged in for this",
        "not_allowed_token_type",
        "Sharing has been turned off for your account by its owner",
    ),
)
ENVIRONMENT_FAULT = (
    (
        "500 Internal Server Error",
        "Internal error: sqlite3.OperationalError: database is locked",
        "[Errno 111] Connection refused",
        "Traceback (most recent call last): KeyError: 'session'",
        "502 Bad Gateway",
        "An unexpected error occurred. Please contact support.",
        "Server disconnected without sending a response.",
        "upstream connect error or disconnect/reset before headers",
    ),
    (
        "MCP error -32000: Connection closed",
        "Error: socket hang up",
        "NullPointerException at Handler.java:112",
        "The service is experiencing problems; our team was notified",
        "net::ERR_CONNECTION_RESET",
        "OperationalError: disk I/O error",
    ),
)
NOT_FOUND = (
    (
        "404 Not Found",
        "Record does not exist",
        "No such file or directory",
        "Error: user not found",
        "Could not resolve to a Repository with that name.",
        "itemNotFound: The resource could not be found.",
        "The specified key does not exist.",
        "Sorry, we couldn't find what you asked for",
    ),
    (
        '{"error":"NotFound","description":"No context element found"}',
        "There is nothing under that id",
        "Unknown order id",
        "Requested entity was not found.",
        "record has been deleted",
        "The item you are looking for is gone",
    ),
)
WRONG_ARGUMENTS = (
    (
        "1 validation error for call: Input should be a valid integer",
        "Invalid params: missing required property",
        "422 Unprocessable Entity: field required",
        "The argument must be one of the values of its list",
        "TypeError: got an unexpected keyword argument",
        "Bad Request: body.amount should be number, instead was text",
    ),
    (
        "MCP error -32602: Invalid arguments for tool: Expected number, received string",
        "Parameter is out of range",
        "Cannot read that date; write it as 2026-05-01",
        "400 Bad Request",
        "value_error: the end lies before the start",
    ),
)
ERROR_MESSAGES = {
    FailureClass.LIMIT: LIMIT,
    FailureClass.UNAUTHORISED: UNAUTHORISED,
    FailureClass.ENVIRONMENT_FAULT: ENVIRONMENT_FAULT,
    FailureClass.NOT_FOUND: NOT_FOUND,
    FailureClass.WRONG_ARGUMENTS: WRONG_ARGUMENTS,
}

CANNOT = (
    (
        "I am unable to do this with the tools I have.",
        "I cannot complete this request.",
        "Sorry, I could not work out which one is meant.",
        "This is not possible here.",
        "I don't have the ability to do that for you.",
        "Unfortunately I wasn't able to finish this.",
        "There is no way to do this, so I stop here.",
        "I would need more information before I can go on.",
    ),
    (
        "I'm sorry, but that is beyond what I can do.",
        "I do not have access to what this needs.",
        "I was not able to complete the task.",
        "Please ask somebody else; I will stop trying.",
        "No tool here lets me do that.",
    ),
)
CLAIMS = (
    (
        "I have done as you asked.",
        "The task is complete.",
        "All set! Everything has been updated.",
        "",
        "Successfully taken care of.",
        "I've finished what you wanted.",
        "It is now as you wished.",
        "",
    ),
    ("Done!", "Your request was handled.", "Finished, anything else?", ""),
)
ASIDES = (
    (
        "",
        "",
        "Let me look.",
        "I will do this now.",
        "",
        "",
        "First I need to see what is there.",
        "Next step.",
    ),
    ("", "", "Checking.", "Now the next call."),
)
