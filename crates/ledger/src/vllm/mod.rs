//! vLLM's batches of KV events, as its PUB socket sends them, to [`EngineEvent`]s.
//!
//! A batch is `[time, [event…], rank]` in MessagePack. Events are maps with a `type` (0.32) or arrays that begin with
//! it (earlier), to which versions append fields. Unknown keys and longer arrays are passed over. What cannot be
//! understood costs as little as soundness allows: a store that event, a removal all claims (nobody knows what it took),
//! and each is counted by its reason.
//!
//! The engine separates caches by more than tokens: adapter, salt, images. Versions that do not say so (`extra_keys` is
//! missing) describe blocks that tokens do not identify; see [`BlockKeys`].

mod msgpack;
mod verify;

use std::{collections::HashMap, fmt::Write as _};

use kvist_blocks::{BlockHash, HashSeed, Namespace, Tier};

pub use self::verify::{HashAlgorithm, HashScheme};
use self::{
    msgpack::Reader,
    verify::{HashVerifier, StatedRun},
};
use crate::{BlockKey, BlockKeys, DescribedBlocks, EngineEvent, EngineHash, Place};

/// Fields of a `BlockStored` in the order of the array form.
const STORED_FIELDS: [&str; 12] = [
    "block_hashes",
    "parent_block_hash",
    "token_ids",
    "block_size",
    "lora_id",
    "medium",
    "lora_name",
    "extra_keys",
    "group_idx",
    "kv_cache_spec_kind",
    "kv_cache_spec_sliding_window",
    "locality",
];
/// Fields of a `BlockRemoved` in the order of the array form.
const REMOVED_FIELDS: [&str; 4] = ["block_hashes", "medium", "group_idx", "locality"];

/// Engines have a handful; each costs a look at every block.
const MOST_GROUPS: u32 = 64;

/// Why something was not understood.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Refusal {
    /// More bytes or events than the limits allow.
    TooLarge,
    /// The bytes end before what they announce, or are no MessagePack.
    Truncated,
    /// No array of a time and events.
    NotABatch,
    /// Neither a map with a `type` nor an array that begins with one.
    NotAnEvent,
    /// A kind of event that is not known.
    UnknownKind,
    /// A field that every version sends is not there.
    MissingField,
    /// A field that holds something else than it should.
    WrongType,
}

impl Refusal {
    /// All reasons.
    pub const ALL: [Self; 7] = [
        Self::TooLarge,
        Self::Truncated,
        Self::NotABatch,
        Self::NotAnEvent,
        Self::UnknownKind,
        Self::MissingField,
        Self::WrongType,
    ];

    /// Its name in metrics.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::TooLarge => "too_large",
            Self::Truncated => "truncated",
            Self::NotABatch => "not_a_batch",
            Self::NotAnEvent => "not_an_event",
            Self::UnknownKind => "unknown_kind",
            Self::MissingField => "missing_field",
            Self::WrongType => "wrong_type",
        }
    }
}

/// What a medium's name stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Medium {
    /// Its tier.
    pub tier: Tier,
    /// It never reports removals.
    pub is_hint: bool,
}

/// What has to be known about an engine to understand it.
#[derive(Clone, Debug)]
pub struct VllmSettings {
    /// The pool's own part of every namespace.
    pub pool: String,
    /// Seed of the cluster's block hashes.
    pub hash_seed: HashSeed,
    /// Names of adapters by the number that older versions send instead.
    pub adapters: HashMap<u64, String>,
    /// Media by their names in lower case. Others are hints in the external tier.
    pub media: HashMap<String, Medium>,
    /// Vouches for an engine that does not state extra keys: nobody sends it salts, images or embeddings. A proof of
    /// the contrary ends all claims.
    pub has_plain_requests_only: bool,
    /// Whether requests may ask the engine to report what it holds already (`kv_cache_report_mode`). To be said only
    /// where none can: a report that is taken for a copy makes claims outlive their blocks.
    pub may_repeat: bool,
    /// How it names its blocks, where that is known and reproducible: then a sample of its hashes is recomputed.
    pub hashes: Option<HashScheme>,
    /// Most bytes of a batch.
    pub most_batch_bytes: usize,
    /// Most events of a batch.
    pub most_batch_events: usize,
}

impl VllmSettings {
    /// The careful settings for an engine of which nothing else is known.
    #[must_use]
    pub fn new(pool: impl Into<String>, hash_seed: HashSeed) -> Self {
        let claim = |tier| Medium { tier, is_hint: false };
        let media = [("gpu", Tier::Device), ("cpu", Tier::Host), ("storage", Tier::Disk)];
        Self {
            pool: pool.into(),
            hash_seed,
            adapters: HashMap::new(),
            media: media.into_iter().map(|(name, tier)| (name.to_owned(), claim(tier))).collect(),
            has_plain_requests_only: false,
            may_repeat: true,
            hashes: None,
            most_batch_bytes: 16 << 20,
            most_batch_events: 1 << 16,
        }
    }
}

/// A batch of one rank.
#[derive(Clone, Debug, PartialEq)]
pub struct VllmBatch {
    /// The rank it is about; none when it does not say.
    pub rank: Option<u32>,
    /// In order.
    pub events: Vec<EngineEvent>,
}

/// What was read since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct VllmCounters {
    /// Batches, whatever became of them.
    pub batches: u64,
    /// Events that were understood.
    pub events: u64,
    /// Hashes of blocks that were recomputed and are the engine's.
    pub verified_hashes: u64,
    /// Hashes that are not: the engine hashes something that it does not state, or otherwise than its caller says.
    pub mismatched_hashes: u64,
    refused: [u64; Refusal::ALL.len()],
}

impl VllmCounters {
    /// Events and batches refused for a reason.
    #[must_use]
    pub fn refused(&self, reason: Refusal) -> u64 {
        self.refused[reason as usize]
    }

    /// Events and batches refused for any reason.
    #[must_use]
    pub fn all_refused(&self) -> u64 {
        self.refused.iter().sum()
    }
}

/// Reads the batches of one engine.
#[derive(Debug)]
pub struct VllmDecoder {
    settings: VllmSettings,
    counters: VllmCounters,
    verifier: Option<HashVerifier>,
}

/// An event in either shape: the spans of its fields, in the order of the array form.
struct Fields<'a, const N: usize>([Option<&'a [u8]>; N]);

impl<'a, const N: usize> Fields<'a, N> {
    fn read(event: &'a [u8], names: &[&str; N]) -> Result<Self, Refusal> {
        let mut fields = [None; N];
        let mut reader = Reader::new(event);
        if reader.is_map() {
            for _ in 0..reader.map()? {
                let key = reader.value()?;
                let value = reader.value()?;
                let name = Reader::new(key).text().unwrap_or_default();
                if let Some(position) = names.iter().position(|known| *known == name) {
                    fields[position] = Some(value);
                }
            }
        } else {
            let values = reader.array()?;
            // The first one is the kind.
            reader.value()?;
            for field in fields.iter_mut().take(values.saturating_sub(1)) {
                *field = Some(reader.value()?);
            }
        }
        Ok(Self(fields))
    }

    /// A field; none when it is missing or nil.
    fn get(&self, position: usize) -> Option<Reader<'a>> {
        self.0[position].map(Reader::new).filter(|reader| !reader.clone().nil())
    }

    fn required(&self, position: usize) -> Result<Reader<'a>, Refusal> {
        self.get(position).ok_or(Refusal::MissingField)
    }
}

impl VllmDecoder {
    /// A decoder that has read nothing.
    #[must_use]
    pub fn new(settings: VllmSettings) -> Self {
        let verifier = settings.hashes.as_ref().map(HashVerifier::new);
        Self { settings, counters: VllmCounters::default(), verifier }
    }

    /// What was read since the start.
    #[must_use]
    pub fn counters(&self) -> VllmCounters {
        self.counters
    }

    /// Reads a batch. One that cannot be read at all is a hole in the engine's stream, and comes out as that.
    pub fn decode(&mut self, payload: &[u8]) -> VllmBatch {
        self.counters.batches += 1;
        if let Some(verifier) = &mut self.verifier {
            verifier.next_batch();
        }
        let mut batch = VllmBatch { rank: None, events: Vec::new() };
        if let Err(reason) = self.read_batch(payload, &mut batch) {
            self.counters.refused[reason as usize] += 1;
            batch.events.push(EngineEvent::Lost);
        }
        batch
    }

    fn read_batch(&mut self, payload: &[u8], batch: &mut VllmBatch) -> Result<(), Refusal> {
        if payload.len() > self.settings.most_batch_bytes {
            return Err(Refusal::TooLarge);
        }
        let mut reader = Reader::new(payload);
        if !reader.is_array() {
            return Err(Refusal::NotABatch);
        }
        let values = reader.array().map_err(|_| Refusal::Truncated)?;
        if values < 2 {
            return Err(Refusal::NotABatch);
        }
        reader.value()?;
        if !reader.is_array() {
            return Err(Refusal::NotABatch);
        }
        let events = reader.array().map_err(|_| Refusal::Truncated)?;
        if events > self.settings.most_batch_events {
            return Err(Refusal::TooLarge);
        }
        for _ in 0..events {
            let event = reader.value()?;
            self.read_event(event, &mut batch.events);
        }
        if values > 2 {
            batch.rank = Reader::new(reader.value()?).integer().ok();
        }
        Ok(())
    }

    fn read_event(&mut self, bytes: &[u8], events: &mut Vec<EngineEvent>) {
        let (read, otherwise) = match kind(bytes) {
            Ok("BlockStored") => (self.stored(bytes), EngineEvent::Unreadable),
            Ok("BlockRemoved") => (self.removed(bytes), EngineEvent::Lost),
            Ok("AllBlocksCleared") => (Ok(EngineEvent::PoolCleared), EngineEvent::Lost),
            Ok(_) => (Err(Refusal::UnknownKind), EngineEvent::Unreadable),
            // It may have been a removal.
            Err(reason) => (Err(reason), EngineEvent::Lost),
        };
        events.push(match read {
            Ok(event) => {
                self.counters.events += 1;
                event
            }
            Err(reason) => {
                self.counters.refused[reason as usize] += 1;
                otherwise
            }
        });
    }

    fn stored(&mut self, bytes: &[u8]) -> Result<EngineEvent, Refusal> {
        let fields = Fields::read(bytes, &STORED_FIELDS)?;
        let hashes = hashes(fields.required(0)?)?;
        let parent = fields.get(1).map(|mut reader| hash(&mut reader)).transpose()?;
        let tokens = tokens(fields.required(2)?)?;
        let block_size_tokens = fields.required(3)?.integer().map_err(|_| Refusal::WrongType)?;
        let adapter = self.adapter(fields.get(4), fields.get(6))?;
        let place = self.place(fields.get(5), fields.get(8), fields.get(11))?;
        let mut salt = String::new();
        let keys = match fields.get(7) {
            // A medium that only names blocks has no keys to state.
            None if self.settings.has_plain_requests_only => BlockKeys::Vouched,
            None => BlockKeys::Unstated,
            Some(reader) => {
                let adapter = adapter.as_deref().unwrap_or_default();
                let first_salt = parent.is_none().then_some(&mut salt);
                BlockKeys::Stated(block_keys(reader, hashes.len(), block_size_tokens, adapter, first_salt)?)
            }
        };
        let is_plain = adapter.as_deref() == Some("")
            && match &keys {
                BlockKeys::Stated(keys) => keys.is_empty(),
                BlockKeys::Vouched => true,
                BlockKeys::Unstated => false,
            };
        if is_plain && let Some(verifier) = &mut self.verifier {
            let run = StatedRun { hashes: &hashes, parent, tokens: &tokens, block_size_tokens, salt: &salt };
            let checked = verifier.check(&run);
            self.counters.verified_hashes += checked.verified;
            self.counters.mismatched_hashes += checked.mismatched;
        }
        let root = adapter.map(|adapter| self.root(&adapter, &salt));
        let may_repeat = self.settings.may_repeat;
        Ok(EngineEvent::Described(Box::new(DescribedBlocks {
            hashes,
            parent,
            tokens,
            block_size_tokens,
            place,
            root,
            keys,
            may_repeat,
        })))
    }

    fn removed(&self, bytes: &[u8]) -> Result<EngineEvent, Refusal> {
        let fields = Fields::read(bytes, &REMOVED_FIELDS)?;
        let hashes = hashes(fields.required(0)?)?;
        let place = self.place(fields.get(1), fields.get(2), fields.get(3))?;
        Ok(EngineEvent::RemovedFrom { hashes, place })
    }

    fn root(&self, adapter: &str, salt: &str) -> BlockHash {
        Namespace::new(&self.settings.pool, adapter, salt).root(self.settings.hash_seed)
    }

    /// The adapter's name, empty without one; none for a number without a name.
    fn adapter(&self, id: Option<Reader<'_>>, name: Option<Reader<'_>>) -> Result<Option<String>, Refusal> {
        if let Some(mut name) = name {
            return Ok(Some(name.text()?.to_owned()));
        }
        let Some(mut id) = id else { return Ok(Some(String::new())) };
        Ok(self.settings.adapters.get(&id.integer()?).cloned())
    }

    fn place(
        &self,
        medium: Option<Reader<'_>>,
        group: Option<Reader<'_>>,
        locality: Option<Reader<'_>>,
    ) -> Result<Place, Refusal> {
        let mut place = Place::sole(Tier::Device);
        if let Some(mut medium) = medium {
            let name = medium.text()?.to_lowercase();
            let medium =
                self.settings.media.get(&name).copied().unwrap_or(Medium { tier: Tier::External, is_hint: true });
            (place.tier, place.is_hint) = (medium.tier, medium.is_hint);
        }
        if let Some(mut group) = group {
            place.group = group.integer()?;
        }
        if place.group >= MOST_GROUPS {
            return Err(Refusal::TooLarge);
        }
        if let Some(mut locality) = locality
            && locality.text()?.eq_ignore_ascii_case("remote")
        {
            place.tier = Tier::External;
        }
        Ok(place)
    }
}

fn kind(event: &[u8]) -> Result<&str, Refusal> {
    let mut reader = Reader::new(event);
    if reader.is_array() {
        if reader.array()? == 0 {
            return Err(Refusal::NotAnEvent);
        }
        return reader.text().map_err(|_| Refusal::NotAnEvent);
    }
    if !reader.is_map() {
        return Err(Refusal::NotAnEvent);
    }
    for _ in 0..reader.map()? {
        let key = reader.value()?;
        let value = reader.value()?;
        if Reader::new(key).text() == Ok("type") {
            return Reader::new(value).text().map_err(|_| Refusal::NotAnEvent);
        }
    }
    Err(Refusal::NotAnEvent)
}

/// A hash as an integer, or as the digest whose last eight bytes the integer is.
fn hash(reader: &mut Reader<'_>) -> Result<EngineHash, Refusal> {
    if reader.is_binary() {
        let last = reader.binary()?.last_chunk::<8>().ok_or(Refusal::WrongType)?;
        return Ok(EngineHash(u64::from_be_bytes(*last)));
    }
    if reader.is_negative() {
        return Ok(EngineHash(reader.signed()?.cast_unsigned()));
    }
    Ok(EngineHash(reader.integer()?))
}

fn hashes(mut reader: Reader<'_>) -> Result<Vec<EngineHash>, Refusal> {
    let count = reader.array()?;
    (0..count).map(|_| hash(&mut reader)).collect()
}

fn tokens(mut reader: Reader<'_>) -> Result<Vec<u32>, Refusal> {
    let count = reader.array()?;
    (0..count).map(|_| reader.integer()).collect()
}

/// Reads one entry for each block: nil, or values without tags in the order adapter, `[image, offset]`…, salt,
/// embedding. The adapter is known from another field. The salt stands at the start of a prompt.
fn block_keys(
    mut reader: Reader<'_>,
    blocks: usize,
    block_size: usize,
    adapter: &str,
    mut first_salt: Option<&mut String>,
) -> Result<Vec<BlockKey>, Refusal> {
    let mut keys = Vec::new();
    let entries = reader.array()?;
    if entries != blocks {
        return Err(Refusal::WrongType);
    }
    for block in 0..entries {
        let salt = first_salt.take();
        if reader.nil() {
            continue;
        }
        let start = block.saturating_mul(block_size);
        let mut unnamed: Vec<&str> = Vec::new();
        for position in 0..reader.array()? {
            if reader.is_text() {
                let text = reader.text()?;
                if position > 0 || adapter.is_empty() || text != adapter {
                    unnamed.push(text);
                }
            } else if reader.is_binary() {
                let mut name = "embedding:".to_owned();
                for byte in reader.binary()? {
                    // Writing to a text does not fail.
                    let _ = write!(name, "{byte:02x}");
                }
                keys.push(BlockKey { token: start, name });
            } else {
                let mut item = Reader::new(reader.value()?);
                if item.array()? != 2 {
                    return Err(Refusal::WrongType);
                }
                let name = item.text()?.to_owned();
                let offset = item.signed()?;
                // One that began in an earlier block is part of that block, and so of all that follow it.
                if let Ok(offset) = usize::try_from(offset) {
                    keys.push(BlockKey { token: start.saturating_add(offset), name });
                }
            }
        }
        if let Some(salt) = salt {
            unnamed.pop().unwrap_or_default().clone_into(salt);
        }
        keys.extend(unnamed.into_iter().map(|name| BlockKey { token: start, name: format!("text:{name}") }));
    }
    Ok(keys)
}
