//! What the indexes are asked and told.

use std::{collections::HashMap, ops::Range, path::Path};

use serde_json::Value;

use crate::contender::BLOCK_TOKENS;

/// Two numbers to one that looks random.
pub fn mix(left: u64, right: u64) -> u64 {
    let mut mixed = (left ^ right.rotate_left(32)).wrapping_add(0x9e37_79b9_7f4a_7c15);
    mixed = (mixed ^ mixed >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ mixed >> 31
}

/// Contents of blocks that occur nowhere else.
pub fn contents(seed: u64, blocks: usize) -> Vec<u64> {
    (0..blocks as u64).map(|block| mix(mix(seed, 0x6b76), block)).collect()
}

/// Tokens of a prompt.
pub fn tokens(seed: u64, tokens: usize) -> Vec<u32> {
    (0..tokens as u64).map(|token| (mix(seed, token) % 150_000) as u32).collect()
}

/// The prompts of a trace as contents of blocks of 16 tokens, and a number for each that says to which conversation it
/// belongs.
pub struct Trace {
    pub prompts: Vec<Vec<u64>>,
    pub conversations: Vec<u64>,
}

impl Trace {
    /// Reads a trace of the form of Mooncake's, in which an id stands for 512 tokens and for all before them.
    pub fn read(path: &Path, most_requests: usize) -> Result<Self, String> {
        const ID_TOKENS: usize = 512;
        let text = std::fs::read_to_string(path).map_err(|error| format!("{}: {error}", path.display()))?;
        let mut trace = Self { prompts: Vec::new(), conversations: Vec::new() };
        for line in text.lines().take(most_requests) {
            let request: Value = serde_json::from_str(line).map_err(|error| format!("{}: {error}", path.display()))?;
            let ids: Vec<u64> =
                request["hash_ids"].as_array().into_iter().flatten().filter_map(Value::as_u64).collect();
            let blocks = request["input_length"].as_u64().unwrap_or(0) as usize / BLOCK_TOKENS;
            let blocks_of_id = (ID_TOKENS / BLOCK_TOKENS) as u64;
            let contents = ids.iter().flat_map(|id| (0..blocks_of_id).map(move |block| mix(id + 1, block)));
            let prompt: Vec<u64> = contents.take(blocks).collect();
            if !prompt.is_empty() {
                trace.prompts.push(prompt);
                // All requests begin with the same id.
                trace.conversations.push(ids.get(1).or(ids.first()).copied().unwrap_or(0));
            }
        }
        Ok(trace)
    }
}

/// One step of a replay, about a prompt by its number.
pub enum Step {
    Lookup { prompt: usize },
    Store { source: usize, prompt: usize, blocks: Range<usize> },
    Remove { source: usize, prompt: usize, blocks: Range<usize> },
}

/// What a source keeps of one prompt beyond what it had of an earlier one.
struct Kept {
    prompt: usize,
    blocks: Range<usize>,
    built_on: Option<usize>,
    used_by: usize,
}

/// The requests of a trace in order: each is looked up, then stored by the source that has its conversation, which
/// removes the oldest blocks that nothing builds on when it has too many. By source, so that threads can share them.
pub fn replay(trace: &Trace, sources: usize, blocks_of_source: usize) -> Vec<Vec<Step>> {
    let mut steps: Vec<Vec<Step>> = (0..sources).map(|_| Vec::new()).collect();
    let mut kept: Vec<(Vec<Option<Kept>>, usize)> = (0..sources).map(|_| (Vec::new(), 0)).collect();
    for (number, prompt) in trace.prompts.iter().enumerate() {
        let source = (mix(trace.conversations[number], 1) % sources as u64) as usize;
        let (kept, held) = &mut kept[source];
        steps[source].push(Step::Lookup { prompt: number });
        let shared = |one: &Kept| {
            let other = &trace.prompts[one.prompt][..one.blocks.end];
            prompt.iter().zip(other).take_while(|(left, right)| left == right).count()
        };
        let best = kept.iter().enumerate().filter_map(|(at, one)| Some((shared(one.as_ref()?), at))).max();
        let (start, built_on) = best.map_or((0, None), |(start, at)| (start, (start > 0).then_some(at)));
        if start == prompt.len() {
            continue;
        }
        // What is shared may reach less far than the one it is found in; then that one's own beginning is built on.
        if let Some(at) = built_on
            && let Some(one) = &mut kept[at]
        {
            one.used_by += 1;
        }
        let blocks = start..prompt.len();
        *held += blocks.len();
        steps[source].push(Step::Store { source, prompt: number, blocks: blocks.clone() });
        kept.push(Some(Kept { prompt: number, blocks, built_on, used_by: 0 }));
        while *held > blocks_of_source {
            let last = kept.len() - 1;
            let is_free = |one: &Option<Kept>| one.as_ref().is_some_and(|one| one.used_by == 0);
            let Some(at) = kept[..last].iter().position(is_free) else { break };
            let Some(one) = kept[at].take() else { break };
            if let Some(before) = one.built_on
                && let Some(before) = &mut kept[before]
            {
                before.used_by -= 1;
            }
            *held -= one.blocks.len();
            steps[source].push(Step::Remove { source, prompt: one.prompt, blocks: one.blocks });
        }
    }
    steps
}

/// Blocks that a trace's sources hold at the end of a replay: source, prompt, blocks, in an order in which they can be told.
pub fn held_at_end(steps: &[Vec<Step>]) -> Vec<(usize, usize, Range<usize>)> {
    let mut held: HashMap<(usize, usize), Range<usize>> = HashMap::new();
    for step in steps.iter().flatten() {
        match step {
            Step::Lookup { .. } => {}
            Step::Store { source, prompt, blocks } => {
                held.insert((*source, *prompt), blocks.clone());
            }
            Step::Remove { source, prompt, .. } => {
                held.remove(&(*source, *prompt));
            }
        }
    }
    let mut held: Vec<_> = held.into_iter().map(|((source, prompt), blocks)| (source, prompt, blocks)).collect();
    held.sort_by_key(|(source, prompt, _)| (*source, *prompt));
    held
}
