//! Request traces: those of Mooncake, and made ones.

use std::time::Duration;

use kvist_schedule::Draws;
use serde::Deserialize;

/// Tokens of a block of a trace.
pub const TRACE_BLOCK_TOKENS: usize = 512;

/// One request of a trace.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TraceRequest {
    /// From the start of the trace.
    pub at: Duration,
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Tokens of the answer; at least one.
    pub output_tokens: u32,
    /// Names of the prompt's blocks of [`TRACE_BLOCK_TOKENS`], the last of which may be partial. Equal names mean equal
    /// tokens behind equal prefixes.
    pub blocks: Vec<u32>,
}

impl TraceRequest {
    /// Token ids: as many for each block as it has tokens, a function of the block's name.
    #[must_use]
    pub fn tokens(&self) -> Vec<u32> {
        let mut tokens = Vec::with_capacity(self.blocks.len() * TRACE_BLOCK_TOKENS);
        for block in &self.blocks {
            // Distinct blocks differ in their first tokens; a token id has to be no more than that.
            let first = block.wrapping_mul(0x9e37_79b1);
            tokens.extend((0..TRACE_BLOCK_TOKENS as u32).map(|position| first.wrapping_add(position)));
        }
        tokens.truncate(self.prompt_tokens);
        tokens
    }
}

/// A line of a trace that cannot be read.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("line {line}: {reason}")]
pub struct TraceError {
    /// From 1.
    pub line: usize,
    /// What is wrong.
    pub reason: String,
}

#[derive(Deserialize)]
struct Line {
    timestamp: u64,
    input_length: usize,
    output_length: u32,
    hash_ids: Vec<u32>,
}

/// Reads a trace in Mooncake's format: a JSON object a line with `timestamp` in milliseconds, `input_length`,
/// `output_length`, and `hash_ids` of blocks of 512 tokens.
///
/// # Errors
/// A line has another form, or time goes backward.
pub fn parse_trace(text: &str) -> Result<Vec<TraceRequest>, TraceError> {
    let mut requests: Vec<TraceRequest> = Vec::new();
    for (number, line) in text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
        let fail = |reason: String| TraceError { line: number + 1, reason };
        let line: Line = serde_json::from_str(line).map_err(|error| fail(error.to_string()))?;
        let blocks = line.input_length.div_ceil(TRACE_BLOCK_TOKENS);
        if line.input_length == 0 || line.hash_ids.len() != blocks {
            let count = line.hash_ids.len();
            return Err(fail(format!("{} tokens are {blocks} blocks, and {count} are named", line.input_length)));
        }
        let at = Duration::from_millis(line.timestamp);
        if requests.last().is_some_and(|last| last.at > at) {
            return Err(fail("its time is before that of the line before".to_owned()));
        }
        requests.push(TraceRequest {
            at,
            prompt_tokens: line.input_length,
            output_tokens: line.output_length.max(1),
            blocks: line.hash_ids,
        });
    }
    Ok(requests)
}

/// Block references that one cache without bounds would serve, as a share of all.
#[must_use]
pub fn ideal_hit_rate(trace: &[TraceRequest]) -> f64 {
    let mut seen: hashbrown::HashSet<u32> = hashbrown::HashSet::new();
    let (mut hits, mut all) = (0usize, 0usize);
    for request in trace {
        all += request.blocks.len();
        hits += request.blocks.iter().take_while(|block| seen.contains(*block)).count();
        seen.extend(&request.blocks);
    }
    if all == 0 { 0.0 } else { hits as f64 / all as f64 }
}

/// Keeps the requests of a time, seconds; the first of them comes as long after 0 as it came after the beginning.
pub fn cut(trace: &mut Vec<TraceRequest>, from_seconds: f64, until_seconds: Option<f64>) {
    let from = Duration::try_from_secs_f64(from_seconds).unwrap_or_default();
    let until = until_seconds.map_or(Duration::MAX, |until| Duration::try_from_secs_f64(until).unwrap_or_default());
    trace.retain(|request| (from..until).contains(&request.at));
    trace.iter_mut().for_each(|request| request.at -= from);
}

/// Moves arrivals together: all of each window arrive at its beginning.
pub fn make_bursty(trace: &mut [TraceRequest], window: Duration) {
    let window = window.as_nanos().max(1);
    for request in trace {
        let start = request.at.as_nanos() / window * window;
        request.at = Duration::from_nanos(u64::try_from(start).unwrap_or(u64::MAX));
    }
}

/// Spreads requests that a trace states with one time evenly over the time to the next one: recorders round times, and
/// routers that must not talk to each other would have to decide on thirty requests in one instant.
pub fn spread_arrivals(trace: &mut [TraceRequest]) {
    let mut start = 0;
    while start < trace.len() {
        let at = trace[start].at;
        let count = trace[start..].iter().take_while(|request| request.at == at).count();
        let gap = trace.get(start + count).map_or(Duration::ZERO, |next| next.at - at);
        for (number, request) in trace[start..start + count].iter_mut().enumerate() {
            request.at += gap.mul_f64(number as f64 / count as f64);
        }
        start += count;
    }
}

/// What made traces have in common.
#[derive(Clone, Copy, Debug)]
pub struct MadeTrace {
    /// Of all draws.
    pub seed: u64,
    /// Requests.
    pub requests: usize,
    /// Requests a second, on average; intervals are exponential.
    pub requests_per_second: f64,
    /// Tokens of each answer.
    pub output_tokens: u32,
}

impl MadeTrace {
    /// Requests that all begin with the same blocks, and go on with blocks of their own: a system prompt.
    #[must_use]
    pub fn shared_prefix(self, shared_blocks: u32, own_blocks: u32) -> Vec<TraceRequest> {
        self.make(|number, _| {
            let own = shared_blocks + number as u32 * own_blocks;
            (0..shared_blocks).chain(own..own + own_blocks).collect()
        })
    }

    /// Conversations of several turns: each turn repeats all that was said and adds some blocks.
    #[must_use]
    pub fn multi_turn(self, conversations: usize, blocks_a_turn: u32) -> Vec<TraceRequest> {
        let mut known: Vec<Vec<u32>> = vec![Vec::new(); conversations.max(1)];
        let mut next = 0;
        self.make(|_, draws| {
            let count = known.len();
            let blocks = &mut known[draws.below(count)];
            blocks.extend(next..next + blocks_a_turn);
            next += blocks_a_turn;
            blocks.clone()
        })
    }

    fn make(self, mut blocks: impl FnMut(usize, &mut Draws) -> Vec<u32>) -> Vec<TraceRequest> {
        let mut draws = Draws::new(self.seed);
        let mut at = 0.0;
        let one = |number: usize| {
            at -= (1.0 - draws.unit()).ln() / self.requests_per_second;
            let blocks = blocks(number, &mut draws);
            TraceRequest {
                at: Duration::try_from_secs_f64(at).unwrap_or_default(),
                prompt_tokens: blocks.len() * TRACE_BLOCK_TOKENS,
                output_tokens: self.output_tokens,
                blocks,
            }
        };
        (0..self.requests).map(one).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_trace_is_read_and_what_is_wrong_is_named() {
        let good = "{\"timestamp\": 1500, \"input_length\": 600, \"output_length\": 0, \"hash_ids\": [7, 8]}\n\n";
        let request =
            TraceRequest { at: Duration::from_millis(1500), prompt_tokens: 600, output_tokens: 1, blocks: vec![7, 8] };
        assert_eq!(Ok(vec![request.clone()]), parse_trace(good));
        assert_eq!(600, request.tokens().len());
        for (line, word) in [
            ("{}", "timestamp"),
            ("{\"timestamp\": 1, \"input_length\": 600, \"output_length\": 1, \"hash_ids\": [7]}", "2 blocks"),
            ("{\"timestamp\": 1, \"input_length\": 1, \"output_length\": 1, \"hash_ids\": [7]}", "before"),
        ] {
            let error = parse_trace(&format!("{good}{line}")).unwrap_err();
            assert_eq!(3, error.line);
            assert!(error.reason.contains(word), "{error}");
        }
    }

    #[test]
    fn a_part_of_a_trace_begins_at_its_own_beginning() {
        let made = MadeTrace { seed: 1, requests: 50, requests_per_second: 10.0, output_tokens: 5 };
        let whole = made.shared_prefix(1, 1);
        let half = Duration::from_secs(2);
        let [mut first, mut second, mut all] = [whole.clone(), whole.clone(), whole.clone()];
        cut(&mut first, 0.0, Some(2.0));
        cut(&mut second, 2.0, None);
        cut(&mut all, 0.0, None);
        assert_eq!(whole, all);
        assert!(!first.is_empty() && first.iter().all(|request| request.at < half));
        second.iter_mut().for_each(|request| request.at += half);
        assert_eq!(whole, [first, second].concat());
    }

    #[test]
    fn made_traces_share_what_they_say() {
        let made = MadeTrace { seed: 1, requests: 50, requests_per_second: 10.0, output_tokens: 5 };
        let shared = made.shared_prefix(3, 2);
        assert_eq!((vec![0, 1, 2, 3, 4], vec![0, 1, 2, 5, 6]), (shared[0].blocks.clone(), shared[1].blocks.clone()));
        assert_eq!(49.0 * 3.0 / 250.0, ideal_hit_rate(&shared));
        let turns = made.multi_turn(5, 2);
        assert!(turns.windows(2).all(|pair| pair[0].at <= pair[1].at));
        assert_eq!(100, turns.iter().flat_map(|turn| &turn.blocks).collect::<hashbrown::HashSet<_>>().len());
        assert_eq!(shared, made.shared_prefix(3, 2));
    }
}
