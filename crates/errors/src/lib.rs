//! The one catalogue of errors: code, gRPC status, HTTP status, OpenAI and Anthropic form.
//!
//! An error becomes a status here and nowhere else; the gRPC server and the HTTP edge both read [`Code`], so they
//! cannot disagree. Each code has a page in `docs/errors/`.

mod catalogue;
mod error;
mod grpc;
mod http;

pub use catalogue::{CatalogueEntry, Code, catalogue};
pub use error::{FieldViolation, KvistError};
pub use grpc::{DOMAIN, from_status};
pub use http::HttpForm;
