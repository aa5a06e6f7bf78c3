//! What the index costs, beside the index crates of peers. See perf/README.md.

mod contender;
mod facts;
mod load;
#[cfg(feature = "peers")]
mod peers;
mod rows;

use std::{path::PathBuf, process::Command};

use serde_json::{Map, Value, json};

use crate::{
    contender::{Contender, Kvist},
    load::Trace,
    rows::{Held, Scale},
};

#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

const USAGE: &str = "usage: bench:index [--quick] [--trace FILE] [--only NAME] [--rows KIND] [--output FILE]";
const REPLAY_SOURCES: usize = 1000;
const REPLAY_BLOCKS_OF_SOURCE: usize = 4096;

struct Options {
    is_quick: bool,
    trace: PathBuf,
    only: Option<String>,
    /// One of hashing, lookup, apply, memory, replay and snapshots.
    rows: Option<String>,
    output: PathBuf,
    /// Of a child that measures memory: contender, what is held, holders.
    memory: Option<(String, String, usize)>,
}

fn options() -> Result<Options, String> {
    let mut options = Options {
        is_quick: false,
        trace: "../shared/traces/mooncake_fast25_conversation_trace.jsonl".into(),
        only: None,
        rows: None,
        output: "results/bench-index.json".into(),
        memory: None,
    };
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        let mut value = || arguments.next().ok_or_else(|| format!("{argument} needs a value; {USAGE}"));
        match argument.as_str() {
            "--quick" => options.is_quick = true,
            "--trace" => options.trace = value()?.into(),
            "--only" => options.only = Some(value()?),
            "--rows" => options.rows = Some(value()?),
            "--output" => options.output = value()?.into(),
            "--memory" => {
                let holders = value()?.parse().map_err(|error| format!("--memory: {error}"))?;
                options.memory = Some((value()?, value()?, holders));
            }
            _ => return Err(format!("{argument} is unknown; {USAGE}")),
        }
    }
    Ok(options)
}

fn main() {
    let result = options().and_then(|options| match &options.memory {
        Some((contender, held, holders)) => memory_child(&options, contender, held, *holders),
        None => run(&options),
    });
    match result {
        Ok(true) => {}
        Ok(false) => std::process::exit(1),
        Err(error) => {
            eprintln!("{error}");
            std::process::exit(2);
        }
    }
}

fn run(options: &Options) -> Result<bool, String> {
    let machine = facts::machine();
    let scale = if options.is_quick { Scale::quick() } else { Scale::full() };
    let trace = read_trace(options);
    if let Err(reason) = &trace {
        println!("no rows of the trace: {reason}");
    }
    let mut results = Map::new();
    let mut measure = |name: &'static str, row: &dyn Fn() -> Value| {
        if options.only.as_ref().is_none_or(|only| name.contains(only.as_str())) {
            println!("\n{name}");
            results.insert(name.to_owned(), row());
        }
    };
    measure(Kvist::NAME, &|| contend::<Kvist>(options, scale, trace.as_ref().ok()));
    #[cfg(feature = "peers")]
    {
        measure(peers::Smg::NAME, &|| contend::<peers::Smg>(options, scale, trace.as_ref().ok()));
        measure(peers::DynamoTree::NAME, &|| contend::<peers::DynamoTree>(options, scale, trace.as_ref().ok()));
        measure(peers::DynamoPositional::NAME, &|| {
            contend::<peers::DynamoPositional>(options, scale, trace.as_ref().ok())
        });
    }
    let limits = limits(&results);
    println!("\nlimits");
    for (name, limit) in &limits {
        let verdict = if limit["met"] == json!(true) { "met" } else { "missed" };
        println!("  {name:<56} {:>9} of {:>6}  {verdict}", limit["value"].to_string(), limit["most"].to_string());
    }
    let are_met = limits.values().all(|limit| limit["met"] == json!(true));
    let result = json!({
        "benchmark": "index",
        "quick": options.is_quick,
        "block_tokens": contender::BLOCK_TOKENS,
        "machine": machine,
        "build": facts::build(),
        "trace_skipped": trace.err(),
        "results": results,
        "limits": limits,
    });
    if let Some(folder) = options.output.parent() {
        std::fs::create_dir_all(folder).map_err(|error| error.to_string())?;
    }
    let text = serde_json::to_string_pretty(&result).map_err(|error| error.to_string())?;
    std::fs::write(&options.output, text + "\n").map_err(|error| format!("{}: {error}", options.output.display()))?;
    println!("\nRESULT {result}");
    Ok(are_met)
}

fn read_trace(options: &Options) -> Result<(Trace, Vec<Vec<load::Step>>), String> {
    let trace = Trace::read(&options.trace, if options.is_quick { 3000 } else { usize::MAX })?;
    let steps = load::replay(&trace, REPLAY_SOURCES, REPLAY_BLOCKS_OF_SOURCE);
    Ok((trace, steps))
}

/// All rows of one contender, or those of one kind.
fn contend<C: Contender>(options: &Options, scale: Scale, trace: Option<&(Trace, Vec<Vec<load::Step>>)>) -> Value {
    let is_wanted = |kind: &str| options.rows.as_ref().is_none_or(|rows| rows == kind);
    let mut result = Map::new();
    if is_wanted("hashing") {
        let hashing = rows::hashing::<C>(scale);
        println!("  hashing: {} MB/s, {} ns a block", hashing["mb_per_second"], hashing["ns_per_block"]);
        result.insert("hashing".to_owned(), hashing);
    }
    if is_wanted("lookup") {
        result.insert("lookup".to_owned(), lookups::<C>(scale));
    }
    if is_wanted("apply") {
        let apply = rows::apply::<C>(scale);
        for name in ["events_of_1_block", "events_of_4_blocks"] {
            let row = &apply[name];
            println!("  {name}: {}/s, {} a CPU second", row["events_per_second"], row["events_per_cpu_second"]);
        }
        result.insert("apply".to_owned(), apply);
    }
    if is_wanted("memory") {
        let mut memory = Map::new();
        for held in ["unique", "trace"] {
            for holders in [1, 8] {
                if held == "trace" && trace.is_none() {
                    continue;
                }
                let row = measure_memory(options, C::NAME, held, holders);
                println!("  bytes a membership, {held}, {holders} holders: {}", row["bytes_per_membership"]);
                memory.insert(format!("{held}_{holders}"), row);
            }
        }
        result.insert("memory".to_owned(), memory.into());
    }
    if is_wanted("replay")
        && let Some((trace, steps)) = trace
    {
        for (name, row) in rows::replay::<C>(trace, steps) {
            println!(
                "  {name}: {} operations/s, {} a CPU second, {} block operations/s, look-up p50 {} µs, p99 {} µs",
                row["operations_per_second"],
                row["operations_per_cpu_second"],
                row["block_operations_per_second"],
                row["p50_us"],
                row["p99_us"]
            );
            result.insert(name.to_owned(), row);
        }
    }
    if is_wanted("snapshots") && C::IS_OWN {
        let row = rows::snapshots();
        println!("  snapshots: {row}");
        result.insert("snapshots".to_owned(), row);
    }
    result.into()
}

fn lookups<C: Contender>(scale: Scale) -> Value {
    println!(
        "  {:<28} {:>9} {:>9}   {:>9} {:>9}   {:>11}",
        "look-up, µs", "idle p50", "p99", "busy p50", "p99", "+ hash p99"
    );
    let mut lookups = Vec::new();
    for tokens in [1_000, 10_000, 100_000] {
        for sources in [8, 64, 1_000] {
            let row = rows::lookup::<C>(scale, tokens, sources);
            println!(
                "  {:<28} {:>9} {:>9}   {:>9} {:>9}   {:>11}",
                format!("{tokens} tokens, {sources} sources"),
                row["idle"]["p50_us"].to_string(),
                row["idle"]["p99_us"].to_string(),
                row["busy"]["p50_us"].to_string(),
                row["busy"]["p99_us"].to_string(),
                row["busy_with_hashing"]["p99_us"].to_string(),
            );
            lookups.push(row);
        }
    }
    lookups.into()
}

/// In a process of its own, whose memory holds nothing else.
fn measure_memory(options: &Options, contender: &str, held: &str, holders: usize) -> Value {
    let mut child = Command::new(std::env::current_exe().unwrap_or_default());
    child.arg("--trace").arg(&options.trace);
    if options.is_quick {
        child.arg("--quick");
    }
    let output = child.arg("--memory").args([&holders.to_string(), contender, held]).output();
    let text = output.map(|output| String::from_utf8_lossy(&output.stdout).into_owned()).unwrap_or_default();
    serde_json::from_str(&text).unwrap_or(Value::Null)
}

fn memory_child(options: &Options, contender: &str, held: &str, holders: usize) -> Result<bool, String> {
    let trace = if held == "trace" { Some(read_trace(options)?) } else { None };
    let held = trace.as_ref().map_or(Held::Unique, |(trace, steps)| Held::Trace(trace, steps));
    let row = match contender {
        Kvist::NAME => rows::memory::<Kvist>(&held, holders),
        #[cfg(feature = "peers")]
        peers::Smg::NAME => rows::memory::<peers::Smg>(&held, holders),
        #[cfg(feature = "peers")]
        peers::DynamoTree::NAME => rows::memory::<peers::DynamoTree>(&held, holders),
        #[cfg(feature = "peers")]
        peers::DynamoPositional::NAME => rows::memory::<peers::DynamoPositional>(&held, holders),
        _ => return Err(format!("{contender} is unknown")),
    };
    println!("{row}");
    Ok(true)
}

/// What the index has to reach.
fn limits(results: &Map<String, Value>) -> Map<String, Value> {
    let mut limits = Map::new();
    let Some(own) = results.get(Kvist::NAME) else { return limits };
    let mut limit = |name: &str, value: &Value, most: f64| {
        let is_met = value.as_f64().is_some_and(|value| value <= most);
        limits.insert(name.to_owned(), json!({ "value": value, "most": most, "met": is_met }));
    };
    let rows = own["lookup"].as_array().into_iter().flatten();
    for row in rows.filter(|row| row["tokens"] == 100_000 && row["sources"] == 64) {
        limit("look-up of 100k tokens at 64 sources, busy, p99 in us", &row["busy"]["p99_us"], 10.0);
        limit("the same with hashing", &row["busy_with_hashing"]["p99_us"], 200.0);
    }
    for (name, row) in own["memory"].as_object().into_iter().flatten() {
        limit(&format!("bytes a membership, {name}"), &row["bytes_per_membership"], 32.0);
    }
    limits
}
