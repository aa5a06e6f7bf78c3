//! What the ledger claims for a request when it arrives, to be held against what the engine then says.

use std::sync::Arc;

use kvist_blocks::{block_hashes, usable_blocks};
use kvist_history::SharedLedger;
use kvist_ledger::Ledger;
use kvist_proto::engine::v1::{EngineRequest, engine_request::Prompt};

use crate::EngineHost;

/// A claim of a ledger, and the state of the ledger that it rests on.
#[derive(Debug)]
pub(crate) struct Promise {
    ledger: Arc<SharedLedger>,
    tokens: u64,
    ended_claims: u64,
}

impl Promise {
    /// The leading tokens of a prompt that the ledger claims to be cached: whole blocks, and never the last token, which
    /// an engine always computes. None where there are none.
    pub(crate) fn of(host: &EngineHost, request: &EngineRequest) -> Option<Self> {
        let Some(Prompt::Tokens(tokens)) = &request.prompt else { return None };
        let ledger = host.ledgers().get(request.rank as usize)?;
        let size = host.block_size_tokens();
        let usable = usable_blocks(tokens.ids.len(), size);
        if usable == 0 {
            return None;
        }
        let root = host.root(&request.adapter, &request.cache_salt);
        let blocks = block_hashes(root, &tokens.ids[..usable * size], size);
        let read = |ledger: &Ledger| (ledger.claimed_prefix_blocks(&blocks), ledger.ended_claims());
        let (claimed, ended_claims) = ledger.read(read);
        (claimed > 0).then(|| Self { ledger: Arc::clone(ledger), tokens: (claimed * size) as u64, ended_claims })
    }

    /// The tokens, when no claim of the ledger has ended since: then they must still have been cached when the engine
    /// placed the request.
    pub(crate) fn undisturbed_tokens(&self) -> Option<u64> {
        (self.ledger.read(Ledger::ended_claims) == self.ended_claims).then_some(self.tokens)
    }
}
