//! The twin against a live mesh: the same trace, the same hits.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod support;

use kvist_proto::{
    engine::v1::{StopConditions, TokenIds},
    router::v1::{self as wire, generate_response::Event, prompt::Form, router_service_client::RouterServiceClient},
};
use kvist_twin::{EngineSettings, MadeTrace, MeshSettings, TRACE_BLOCK_TOKENS, TraceRequest, policy, run_mesh};
use kvist_worker::SimWorkerSettings;
use support::*;

const WORKERS: usize = 4;
/// Enough for every conversation once, and not for each at every worker.
const POOL_BLOCKS: usize = 96;
const TOKENS_PER_SECOND: f64 = 15_000.0;
/// Tokens of a live block, of which a trace's block has a whole number.
const LIVE_BLOCK_TOKENS: usize = 16;

/// The model's tokens are bytes.
fn tokens(request: &TraceRequest) -> Vec<u32> {
    let of_block = |block: &u32| {
        let block = u64::from(*block);
        (0..TRACE_BLOCK_TOKENS as u64).map(move |position| {
            let mixed = (block << 16 | position).wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            (mixed >> 56) as u32
        })
    };
    request.blocks.iter().flat_map(of_block).collect()
}

/// Tokens found in a cache, as a share of all prompt tokens.
async fn live_hit_rate(trace: &[TraceRequest]) -> f64 {
    let sim = SimWorkerSettings {
        block_size_tokens: LIVE_BLOCK_TOKENS as u32,
        blocks: (POOL_BLOCKS * TRACE_BLOCK_TOKENS / LIVE_BLOCK_TOKENS) as u32,
        prefill_tokens_per_second: TOKENS_PER_SECOND,
        ..SimWorkerSettings::default()
    };
    let mut workers = Vec::new();
    for number in 0..WORKERS {
        workers.push(TestWorker::start_sim(number, sim.clone()).await);
    }
    let router = router(settings(), &workers.iter().collect::<Vec<_>>()).await;
    until("all sources are exact", || router.status().exact_index_sources == WORKERS).await;
    let address = router.addresses().grpc_address.to_string();
    let channel = tonic::transport::Channel::from_shared(format!("http://{address}")).unwrap().connect().await.unwrap();
    let started = tokio::time::Instant::now();
    let requests: Vec<_> = trace
        .iter()
        .map(|request| {
            let mut client = RouterServiceClient::new(channel.clone());
            let (at, ids, output_tokens) = (started + request.at, tokens(request), request.output_tokens);
            tokio::spawn(async move {
                tokio::time::sleep_until(at).await;
                let request = wire::GenerateRequest {
                    model: MODEL.to_owned(),
                    prompt: Some(wire::Prompt { form: Some(Form::Tokens(TokenIds { ids })) }),
                    stop: Some(StopConditions { max_tokens: Some(output_tokens), ..StopConditions::default() }),
                    ..wire::GenerateRequest::default()
                };
                let mut messages = limited(client.generate(request)).await.unwrap().into_inner();
                let mut receipt = None;
                while let Some(message) = limited(messages.message()).await.unwrap() {
                    if let Some(Event::Finished(finished)) = message.event {
                        receipt = finished.receipt;
                    }
                }
                receipt.expect("the engine says what it found")
            })
        })
        .collect();
    let (mut cached, mut all) = (0.0, 0.0);
    for request in requests {
        let receipt = request.await.unwrap();
        cached += f64::from(receipt.cached_tokens);
        all += f64::from(receipt.prompt_tokens);
    }
    router.stop().await;
    cached / all
}

fn twin_hit_rate(trace: &[TraceRequest], name: &str) -> f64 {
    let engine = EngineSettings {
        prefill_tokens_per_second: TOKENS_PER_SECOND,
        blocks: POOL_BLOCKS,
        decode_step_seconds: 0.005,
        decode_step_seconds_per_request: 0.000_05,
        ..EngineSettings::default()
    };
    let settings = MeshSettings { workers: WORKERS, engine, ..MeshSettings::default() };
    run_mesh(&settings, trace, name, &policy(name).unwrap()).hit_rate
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_twin_finds_as_many_hits_as_a_live_mesh() {
    let made = MadeTrace { seed: 11, requests: 200, requests_per_second: 20.0, output_tokens: 3 };
    let trace = made.multi_turn(30, 1);
    assert_eq!(0, TRACE_BLOCK_TOKENS % LIVE_BLOCK_TOKENS);
    let (live, twin) = (live_hit_rate(&trace).await, twin_hit_rate(&trace, "cost"));
    assert!((live - twin).abs() < 0.02, "live {live:.3}, twin {twin:.3}");
    // It takes a choice to get there.
    assert!(twin > twin_hit_rate(&trace, "round_robin") + 0.2);
}
