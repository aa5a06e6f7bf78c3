//! An engine that says what it does in vLLM's words: both shapes of events, all shapes of hashes.

use rmp::encode;

/// How events are written.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Wire {
    /// Maps with a `type`, or arrays that begin with it.
    pub(crate) maps: bool,
    /// Digests of 32 bytes, or their last eight as an integer.
    pub(crate) digests: bool,
    /// Fields and values that no version has.
    pub(crate) extras: bool,
}

/// A value of an event's field.
#[derive(Clone, Debug)]
pub(crate) enum Field {
    Nil,
    Int(u64),
    Signed(i64),
    Text(String),
    Hash(u64),
    Binary(Vec<u8>),
    List(Vec<Field>),
}

impl Field {
    pub(crate) fn text(text: &str) -> Self {
        Self::Text(text.to_owned())
    }

    pub(crate) fn hashes(hashes: &[u64]) -> Self {
        Self::List(hashes.iter().copied().map(Self::Hash).collect())
    }

    pub(crate) fn tokens(tokens: &[u32]) -> Self {
        Self::List(tokens.iter().map(|token| Self::Int(u64::from(*token))).collect())
    }

    fn write(&self, wire: Wire, out: &mut Vec<u8>) {
        match self {
            Self::Nil => encode::write_nil(out).unwrap(),
            Self::Int(value) => drop(encode::write_uint(out, *value).unwrap()),
            Self::Signed(value) => drop(encode::write_sint(out, *value).unwrap()),
            Self::Text(text) => encode::write_str(out, text).unwrap(),
            Self::Hash(hash) if wire.digests => {
                let mut digest = [7; 32];
                digest[24..].copy_from_slice(&hash.to_be_bytes());
                encode::write_bin(out, &digest).unwrap();
            }
            Self::Hash(hash) => drop(encode::write_uint(out, *hash).unwrap()),
            Self::Binary(bytes) => encode::write_bin(out, bytes).unwrap(),
            Self::List(items) => {
                encode::write_array_len(out, u32::try_from(items.len()).unwrap()).unwrap();
                items.iter().for_each(|item| item.write(wire, out));
            }
        }
    }
}

/// An event: its kind, and its fields in the order of the array form.
pub(crate) type Event = (&'static str, Vec<(&'static str, Field)>);

pub(crate) fn write_event(event: &Event, wire: Wire) -> Vec<u8> {
    let (kind, fields) = event;
    let mut out = Vec::new();
    let extra = u32::from(wire.extras);
    let count = u32::try_from(fields.len()).unwrap() + 1 + extra;
    if wire.maps {
        encode::write_map_len(&mut out, count).unwrap();
        if wire.extras {
            encode::write_str(&mut out, "from_the_future").unwrap();
            Field::List(vec![Field::Nil, Field::List(vec![Field::Signed(-7)]), Field::Binary(vec![1, 2])])
                .write(wire, &mut out);
        }
        encode::write_str(&mut out, "type").unwrap();
        encode::write_str(&mut out, kind).unwrap();
        for (name, field) in fields {
            encode::write_str(&mut out, name).unwrap();
            field.write(wire, &mut out);
        }
    } else {
        // Nothing unknown may stand between the known ones: only a full array has room behind it.
        let extra = if fields.len() >= 12 { extra } else { 0 };
        encode::write_array_len(&mut out, u32::try_from(fields.len()).unwrap() + 1 + extra).unwrap();
        encode::write_str(&mut out, kind).unwrap();
        fields.iter().for_each(|(_, field)| field.write(wire, &mut out));
        if extra > 0 {
            Field::List(vec![Field::text("more")]).write(wire, &mut out);
        }
    }
    out
}

/// A batch of written events.
pub(crate) fn write_batch(events: &[Vec<u8>], rank: u32) -> Vec<u8> {
    let mut out = Vec::new();
    encode::write_array_len(&mut out, 3).unwrap();
    encode::write_f64(&mut out, 1.5).unwrap();
    encode::write_array_len(&mut out, u32::try_from(events.len()).unwrap()).unwrap();
    events.iter().for_each(|event| out.extend_from_slice(event));
    encode::write_uint(&mut out, u64::from(rank)).unwrap();
    out
}

/// A store with all fields; change what is special about it.
pub(crate) fn stored(hashes: &[u64], parent: Option<u64>, tokens: &[u32], block_size: u64) -> Event {
    let parent = parent.map_or(Field::Nil, Field::Hash);
    let keys = Field::List(hashes.iter().map(|_| Field::Nil).collect());
    let fields = vec![
        ("block_hashes", Field::hashes(hashes)),
        ("parent_block_hash", parent),
        ("token_ids", Field::tokens(tokens)),
        ("block_size", Field::Int(block_size)),
        ("lora_id", Field::Nil),
        ("medium", Field::text("GPU")),
        ("lora_name", Field::Nil),
        ("extra_keys", keys),
        ("group_idx", Field::Int(0)),
        ("kv_cache_spec_kind", Field::text("full_attention")),
        ("kv_cache_spec_sliding_window", Field::Nil),
        ("locality", Field::text("LOCAL")),
    ];
    ("BlockStored", fields)
}

pub(crate) fn removed(hashes: &[u64], medium: &str, group: u64) -> Event {
    let fields = vec![
        ("block_hashes", Field::hashes(hashes)),
        ("medium", Field::text(medium)),
        ("group_idx", Field::Int(group)),
        ("locality", Field::text("LOCAL")),
    ];
    ("BlockRemoved", fields)
}

pub(crate) fn cleared() -> Event {
    ("AllBlocksCleared", Vec::new())
}

pub(crate) fn with(mut event: Event, name: &str, value: Field) -> Event {
    event.1.iter_mut().find(|(known, _)| *known == name).unwrap().1 = value;
    event
}
