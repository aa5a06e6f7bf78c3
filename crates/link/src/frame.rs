//! What fits into a frame.

use kvist_proto::engine::v1::{StreamEvent, TokenDelta, stream_event};
use prost::Message as _;

/// Largest encoded frame. One message that is larger by itself travels alone.
pub const FRAME_LIMIT_BYTES: usize = 64 * 1024;

/// Tag and length of an embedded message, at most.
pub(crate) const EMBEDDING_BYTES: usize = 6;

/// Tokens that one delta collects at most while it waits; 5 bytes each at most, so it is well below a frame.
pub(crate) const DELTA_LIMIT_TOKENS: usize = 4096;

/// Encoded size of an event, at most. Deltas are estimated: they are many, and walking them twice costs more than some
/// empty space at the end of a frame.
pub(crate) fn event_bytes(event: &StreamEvent) -> usize {
    let inner = match &event.event {
        Some(stream_event::Event::Delta(delta)) => delta_bytes(delta),
        Some(stream_event::Event::Finished(finished)) => finished.encoded_len(),
        Some(stream_event::Event::Failed(failed)) => failed.encoded_len(),
        None => 0,
    };
    inner + 3 * EMBEDDING_BYTES
}

fn delta_bytes(delta: &TokenDelta) -> usize {
    let logprobs: usize = delta.logprobs.iter().map(|one| 16 + 16 * one.top.len()).sum();
    24 + 5 * delta.token_ids.len() + logprobs
}

/// Appends a delta to one that still waits. Gives it back when they cannot be one: another choice, log-probabilities,
/// or too much.
pub(crate) fn merge_delta(waiting: &mut TokenDelta, next: TokenDelta) -> Option<TokenDelta> {
    let fits = waiting.index == next.index
        && waiting.logprobs.is_empty()
        && next.logprobs.is_empty()
        && next.cached_tokens.is_none()
        && waiting.token_ids.len() + next.token_ids.len() <= DELTA_LIMIT_TOKENS;
    if !fits {
        return Some(next);
    }
    waiting.token_ids.extend_from_slice(&next.token_ids);
    None
}

#[cfg(test)]
mod tests {
    use kvist_proto::engine::v1::{Finished, TokenLogprobs, TopLogprob};
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn an_event_is_never_larger_than_estimated(
            stream_id: u32, index: u32, token_ids in prop::collection::vec(any::<u32>(), 0..50),
            cached_tokens: Option<u32>, tops in prop::collection::vec(0usize..5, 0..5),
        ) {
            let top = TopLogprob { token_id: u32::MAX, logprob: -1.5 };
            let logprobs = tops.iter().map(|count| TokenLogprobs { logprob: -0.5, top: vec![top; *count] }).collect();
            let delta = TokenDelta { index, token_ids, logprobs, cached_tokens };
            let event = StreamEvent { stream_id, event: Some(stream_event::Event::Delta(delta)) };
            prop_assert!(event.encoded_len() + EMBEDDING_BYTES <= event_bytes(&event));
            let finished = Finished { stop_token_id: Some(index), ..Finished::default() };
            let event = StreamEvent { stream_id, event: Some(stream_event::Event::Finished(finished)) };
            prop_assert!(event.encoded_len() + EMBEDDING_BYTES <= event_bytes(&event));
        }
    }

    #[test]
    fn deltas_of_one_choice_become_one() {
        let mut waiting = TokenDelta { token_ids: vec![1], cached_tokens: Some(3), ..TokenDelta::default() };
        assert_eq!(None, merge_delta(&mut waiting, TokenDelta { token_ids: vec![2, 3], ..TokenDelta::default() }));
        assert_eq!(vec![1, 2, 3], waiting.token_ids);
        let other = TokenDelta { index: 1, token_ids: vec![4], ..TokenDelta::default() };
        assert_eq!(Some(other.clone()), merge_delta(&mut waiting, other));
    }
}
