//! Bodies of every endpoint: whatever the bytes are, they are read or refused as the client's fault.

#![no_main]

use kvist_dialect::{
    parse_chat_completion, parse_completion, parse_count_tokens, parse_detokenize, parse_embeddings, parse_head,
    parse_messages, parse_response, parse_tokenize,
};
use kvist_errors::KvistError;
use libfuzzer_sys::fuzz_target;

fn check<T>(parsed: Result<T, KvistError>) {
    if let Err(error) = parsed {
        assert!((400..500).contains(&error.code.http_status()), "{error:?}");
        assert!(!error.message.is_empty());
    }
}

fuzz_target!(|body: &[u8]| {
    check(parse_chat_completion(body));
    check(parse_completion(body));
    check(parse_messages(body));
    check(parse_count_tokens(body));
    check(parse_response(body));
    check(parse_embeddings(body));
    check(parse_tokenize(body));
    check(parse_detokenize(body));
    check(parse_head(body));
});
