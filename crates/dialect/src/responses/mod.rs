//! The Responses API of OpenAI, without what needs a store.

mod request;
mod response;

pub use request::parse_response;
pub(crate) use response::ResponsesWriter;
