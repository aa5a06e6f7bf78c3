//! The codes, and what each becomes.

use serde::Serialize;

macro_rules! codes {
    ($( $(#[$doc:meta])* $variant:ident = $name:literal, $grpc:ident, $http:literal, $openai_type:literal, $openai_code:literal, $anthropic:literal, $retryable:literal, $title:literal; )*) => {
        /// A stable code, as it travels in `google.rpc.ErrorInfo.reason`.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[non_exhaustive]
        pub enum Code {
            $( $(#[$doc])* $variant, )*
        }

        impl Code {
            /// Every code.
            pub const ALL: &'static [Self] = &[$(Self::$variant),*];

            /// The name, UPPER_SNAKE.
            #[must_use]
            pub fn name(self) -> &'static str {
                match self { $(Self::$variant => $name),* }
            }

            /// The gRPC status code.
            #[must_use]
            pub fn grpc(self) -> tonic::Code {
                match self { $(Self::$variant => tonic::Code::$grpc),* }
            }

            /// The HTTP status.
            #[must_use]
            pub fn http_status(self) -> u16 {
                match self { $(Self::$variant => $http),* }
            }

            /// `error.type` of the OpenAI API.
            #[must_use]
            pub fn openai_type(self) -> &'static str {
                match self { $(Self::$variant => $openai_type),* }
            }

            /// `error.code` of the OpenAI API.
            #[must_use]
            pub fn openai_code(self) -> &'static str {
                match self { $(Self::$variant => $openai_code),* }
            }

            /// `error.type` of the Anthropic API.
            #[must_use]
            pub fn anthropic_type(self) -> &'static str {
                match self { $(Self::$variant => $anthropic),* }
            }

            /// Whether the same call may succeed later without a change.
            #[must_use]
            pub fn is_retryable(self) -> bool {
                match self { $(Self::$variant => $retryable),* }
            }

            /// One line for people.
            #[must_use]
            pub fn title(self) -> &'static str {
                match self { $(Self::$variant => $title),* }
            }

            /// The code of a name; none for a name of another version.
            #[must_use]
            pub fn from_name(name: &str) -> Option<Self> {
                match name { $($name => Some(Self::$variant),)* _ => None }
            }
        }
    };
}

codes! {
    /// A field is wrong.
    InvalidArgument = "INVALID_ARGUMENT", InvalidArgument, 400, "invalid_request_error", "invalid_argument", "invalid_request_error", false, "A field of the request is wrong";
    /// No such model.
    UnknownModel = "UNKNOWN_MODEL", NotFound, 404, "invalid_request_error", "model_not_found", "not_found_error", false, "The model does not exist";
    /// Prompt and completion do not fit.
    ContextLengthExceeded = "CONTEXT_LENGTH_EXCEEDED", InvalidArgument, 400, "invalid_request_error", "context_length_exceeded", "invalid_request_error", false, "The prompt does not fit the model's context";
    /// A known field that this model or version cannot honor.
    UnsupportedField = "UNSUPPORTED_FIELD", InvalidArgument, 400, "invalid_request_error", "unsupported_parameter", "invalid_request_error", false, "A field cannot be honored";
    /// A field that only the mesh may set.
    MeshOnlyField = "MESH_ONLY_FIELD", InvalidArgument, 400, "invalid_request_error", "unsupported_parameter", "invalid_request_error", false, "Only the mesh may set this field";
    /// The body is larger than the limit.
    RequestTooLarge = "REQUEST_TOO_LARGE", ResourceExhausted, 413, "request_too_large", "request_too_large", "request_too_large", false, "The request is larger than the limit";
    /// No key, or a wrong one.
    InvalidApiKey = "INVALID_API_KEY", Unauthenticated, 401, "invalid_request_error", "invalid_api_key", "authentication_error", false, "The API key is missing or wrong";
    /// The key or certificate is right and may not do this.
    PermissionDenied = "PERMISSION_DENIED", PermissionDenied, 403, "invalid_request_error", "permission_denied", "permission_error", false, "The key or certificate may not do this";
    /// No target of the model takes requests.
    NoReadyTarget = "NO_READY_TARGET", Unavailable, 503, "service_unavailable", "no_ready_target", "overloaded_error", true, "No worker of the model takes requests";
    /// Too much is running.
    Overloaded = "OVERLOADED", ResourceExhausted, 429, "server_overloaded", "server_overloaded", "overloaded_error", true, "Too many requests are running";
    /// Too much is waiting.
    QueueFull = "QUEUE_FULL", ResourceExhausted, 429, "server_overloaded", "queue_full", "overloaded_error", true, "Too many requests are waiting";
    /// It waited longer than a request may.
    QueueTimeout = "QUEUE_TIMEOUT", DeadlineExceeded, 504, "timeout_error", "queue_timeout", "timeout_error", true, "The request waited too long to be started";
    /// More waits at the target than the decision rests on.
    BusierThanExpected = "BUSIER_THAN_EXPECTED", ResourceExhausted, 429, "server_overloaded", "server_overloaded", "overloaded_error", true, "More waits at the worker than the router knew of";
    /// The engine cannot be reached.
    EngineUnavailable = "ENGINE_UNAVAILABLE", Unavailable, 503, "service_unavailable", "engine_unavailable", "overloaded_error", true, "The engine cannot be reached";
    /// The engine was lost while it answered.
    EngineLost = "ENGINE_LOST", Unavailable, 503, "service_unavailable", "engine_lost", "overloaded_error", true, "The engine was lost while it answered";
    /// An edge reaches no router.
    RouterUnavailable = "ROUTER_UNAVAILABLE", Unavailable, 503, "service_unavailable", "router_unavailable", "overloaded_error", true, "No router can be reached";
    /// The router behind an edge was lost while it answered.
    RouterLost = "ROUTER_LOST", Unavailable, 503, "service_unavailable", "router_lost", "overloaded_error", true, "The router was lost while it answered";
    /// The engine reported a failure.
    EngineFailed = "ENGINE_FAILED", Internal, 500, "server_error", "engine_failed", "api_error", false, "The engine failed on this request";
    /// The KV of a prompt did not come from the prefill engine.
    KvTransferFailed = "KV_TRANSFER_FAILED", Unavailable, 503, "service_unavailable", "kv_transfer_failed", "overloaded_error", true, "The prompt's KV did not arrive at the decode engine";
    /// Time is up.
    DeadlineExceeded = "DEADLINE_EXCEEDED", DeadlineExceeded, 504, "timeout_error", "deadline_exceeded", "timeout_error", true, "The deadline passed";
    /// No connection in time.
    ConnectTimeout = "CONNECT_TIMEOUT", DeadlineExceeded, 504, "timeout_error", "connect_timeout", "timeout_error", true, "The engine did not take the request in time";
    /// No first token in time.
    FirstTokenTimeout = "FIRST_TOKEN_TIMEOUT", DeadlineExceeded, 504, "timeout_error", "first_token_timeout", "timeout_error", true, "The first token did not come in time";
    /// Silence after a token.
    TokenTimeout = "TOKEN_TIMEOUT", DeadlineExceeded, 504, "timeout_error", "token_timeout", "timeout_error", true, "The next token did not come in time";
    /// The body did not come.
    BodyTimeout = "BODY_TIMEOUT", DeadlineExceeded, 408, "invalid_request_error", "body_timeout", "invalid_request_error", false, "The body of the request did not come in time";
    /// Too many bytes before the body.
    HeadersTooLarge = "HEADERS_TOO_LARGE", ResourceExhausted, 431, "request_too_large", "headers_too_large", "request_too_large", false, "The headers are larger than the limit";
    /// The client went away.
    Cancelled = "CANCELLED", Cancelled, 499, "invalid_request_error", "cancelled", "invalid_request_error", false, "The client ended the request";
    /// The client does not read.
    SlowClient = "SLOW_CLIENT", Aborted, 409, "conflict_error", "slow_client", "invalid_request_error", true, "The client reads too slowly";
    /// The process is being stopped.
    Draining = "DRAINING", Unavailable, 503, "service_unavailable", "draining", "overloaded_error", true, "The process is being stopped";
    /// The same id runs already.
    DuplicateRequest = "DUPLICATE_REQUEST", AlreadyExists, 409, "conflict_error", "duplicate_request", "invalid_request_error", false, "A request of this id is running";
    /// The worker is of another generation.
    PoolRevisionMismatch = "POOL_REVISION_MISMATCH", FailedPrecondition, 400, "invalid_request_error", "pool_revision_mismatch", "invalid_request_error", false, "The worker belongs to another pool revision";
    /// A newer leader has spoken.
    StaleFence = "STALE_FENCE", FailedPrecondition, 400, "invalid_request_error", "stale_fence", "invalid_request_error", false, "A newer leader has taken over";
    /// The state of things forbids the call.
    PreconditionFailed = "PRECONDITION_FAILED", FailedPrecondition, 400, "invalid_request_error", "precondition_failed", "invalid_request_error", false, "The state of things forbids the call";
    /// No such thing.
    NotFound = "NOT_FOUND", NotFound, 404, "invalid_request_error", "not_found", "not_found_error", false, "It does not exist";
    /// It is there already.
    AlreadyExists = "ALREADY_EXISTS", AlreadyExists, 409, "conflict_error", "already_exists", "invalid_request_error", false, "It exists already";
    /// Somebody else changed it.
    Conflict = "CONFLICT", Aborted, 409, "conflict_error", "conflict", "invalid_request_error", true, "It was changed by somebody else";
    /// Not built, or not in this engine.
    NotImplemented = "NOT_IMPLEMENTED", Unimplemented, 501, "invalid_request_error", "unsupported", "invalid_request_error", false, "This is not supported";
    /// Not yet.
    NotReady = "NOT_READY", Unavailable, 503, "service_unavailable", "not_ready", "overloaded_error", true, "The process is not ready";
    /// A resource is wrong.
    InvalidManifest = "INVALID_MANIFEST", InvalidArgument, 400, "invalid_request_error", "invalid_manifest", "invalid_request_error", false, "The manifest is wrong";
    /// This prompt has killed an engine.
    PromptQuarantined = "PROMPT_QUARANTINED", FailedPrecondition, 400, "invalid_request_error", "prompt_quarantined", "invalid_request_error", false, "The prompt has ended an engine and is held back";
    /// The chat template refused the conversation.
    TemplateFailed = "TEMPLATE_FAILED", InvalidArgument, 400, "invalid_request_error", "template_failed", "invalid_request_error", false, "The chat template refused the conversation";
    /// A fault of Kvist.
    Internal = "INTERNAL", Internal, 500, "server_error", "internal_error", "api_error", false, "Kvist has a fault";
}

impl Code {
    /// Name of the gRPC status, UPPER_SNAKE.
    #[must_use]
    pub fn grpc_name(self) -> &'static str {
        grpc_name(self.grpc())
    }

    /// Whether whoever serves is at fault, and not the request or its sender.
    #[must_use]
    pub fn is_fault_of_server(self) -> bool {
        self.http_status() >= 500
    }
}

/// One line of the catalogue, for other languages and for the docs.
#[derive(Clone, Debug, Serialize)]
pub struct CatalogueEntry {
    /// Name of the code.
    pub code: &'static str,
    /// Name of the gRPC status.
    pub grpc: &'static str,
    /// Number of the gRPC status.
    pub grpc_number: i32,
    /// HTTP status.
    pub http: u16,
    /// Whether the same call may succeed later.
    pub retryable: bool,
    /// One line for people.
    pub title: &'static str,
}

/// The whole catalogue.
#[must_use]
pub fn catalogue() -> Vec<CatalogueEntry> {
    Code::ALL
        .iter()
        .map(|code| CatalogueEntry {
            code: code.name(),
            grpc: code.grpc_name(),
            grpc_number: code.grpc() as i32,
            http: code.http_status(),
            retryable: code.is_retryable(),
            title: code.title(),
        })
        .collect()
}

/// Name of a gRPC status as specifications write it.
pub(crate) fn grpc_name(code: tonic::Code) -> &'static str {
    match code {
        tonic::Code::Ok => "OK",
        tonic::Code::Cancelled => "CANCELLED",
        tonic::Code::Unknown => "UNKNOWN",
        tonic::Code::InvalidArgument => "INVALID_ARGUMENT",
        tonic::Code::DeadlineExceeded => "DEADLINE_EXCEEDED",
        tonic::Code::NotFound => "NOT_FOUND",
        tonic::Code::AlreadyExists => "ALREADY_EXISTS",
        tonic::Code::PermissionDenied => "PERMISSION_DENIED",
        tonic::Code::ResourceExhausted => "RESOURCE_EXHAUSTED",
        tonic::Code::FailedPrecondition => "FAILED_PRECONDITION",
        tonic::Code::Aborted => "ABORTED",
        tonic::Code::OutOfRange => "OUT_OF_RANGE",
        tonic::Code::Unimplemented => "UNIMPLEMENTED",
        tonic::Code::Internal => "INTERNAL",
        tonic::Code::Unavailable => "UNAVAILABLE",
        tonic::Code::DataLoss => "DATA_LOSS",
        tonic::Code::Unauthenticated => "UNAUTHENTICATED",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_code_has_a_page_in_the_docs() {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/errors");
        let missing: Vec<&str> = Code::ALL
            .iter()
            .map(|code| code.name())
            .filter(|name| !std::path::Path::new(&format!("{folder}/{name}.md")).is_file())
            .collect();
        assert_eq!(Vec::<&str>::new(), missing);
    }

    #[test]
    fn pages_say_what_the_catalogue_says_and_none_is_left_over() {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/errors");
        for page in std::fs::read_dir(folder).unwrap() {
            let path = page.unwrap().path();
            let name = path.file_stem().unwrap().to_str().unwrap().to_owned();
            if name == "README" {
                continue;
            }
            let code = Code::from_name(&name).unwrap_or_else(|| panic!("{name} is no code"));
            let expected = format!(
                "# {name}\n\n{}. gRPC `{}`, HTTP {}.\n\n**Why.** ",
                code.title(),
                grpc_name(code.grpc()),
                code.http_status()
            );
            let text = std::fs::read_to_string(&path).unwrap();
            assert!(text.starts_with(&expected), "{name}: the page must begin with\n{expected}");
            assert!(text.contains("\n\n**What to do.** "), "{name}");
        }
    }

    #[test]
    fn http_follows_grpc() {
        for code in Code::ALL {
            let expected: &[u16] = match code.grpc() {
                tonic::Code::InvalidArgument | tonic::Code::FailedPrecondition => &[400],
                tonic::Code::Unauthenticated => &[401],
                tonic::Code::PermissionDenied => &[403],
                tonic::Code::NotFound => &[404],
                tonic::Code::AlreadyExists | tonic::Code::Aborted => &[409],
                tonic::Code::ResourceExhausted => &[413, 429, 431],
                tonic::Code::Cancelled => &[499],
                tonic::Code::Internal => &[500],
                tonic::Code::Unimplemented => &[501],
                tonic::Code::Unavailable => &[503],
                tonic::Code::DeadlineExceeded => &[408, 504],
                other => panic!("{other:?} has no HTTP status"),
            };
            assert!(expected.contains(&code.http_status()), "{}", code.name());
        }
    }

    #[test]
    fn names_are_unique_and_fit_error_info() {
        let names: std::collections::HashSet<&str> = Code::ALL.iter().map(|code| code.name()).collect();
        assert_eq!(Code::ALL.len(), names.len());
        for code in Code::ALL {
            assert!(
                code.name().len() <= 63 && code.name().bytes().all(|byte| byte.is_ascii_uppercase() || byte == b'_')
            );
            assert_eq!(Some(*code), Code::from_name(code.name()));
        }
    }
}
