//! OpenAI requests and answers to and from one internal request and event stream.
