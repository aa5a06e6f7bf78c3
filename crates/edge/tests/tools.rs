//! Tool calls and thoughts as clients of each API see them.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod support;

use std::net::SocketAddr;

use kvist_proto::{
    controller::v1::Model,
    engine::v1::{AbortReason, structured_output::Constraint},
    router::v1::{self as wire, generate_response::Event, router_service_client::RouterServiceClient},
};
use serde_json::{Value, json};
use support::*;

/// As templates of Qwen 3 are, in short.
const QWEN: &str = "{% if tools %}{% for tool in tools %}{{ tool | tojson }}{% endfor %}<tool_call>{% endif %}\
                    {% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content }}\
                    {% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}\
                    {% for call in message.tool_calls or [] %}{{ call | tojson }}{% endfor %}<|im_end|>\n{% endfor %}\
                    {% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}\
                    {% if enable_thinking is defined and not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}\
                    {% elif enable_thinking is defined %}{{ '<think>\n' }}{% endif %}{% endif %}";

const CALL: &str =
    "<think>\nWhere?\n</think>\n\nI look.\n<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\":  1}}\n</tool_call>";

fn tools() -> Value {
    json!([{"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}},
        {"type": "function", "function": {"name": "g"}}])
}

async fn ask(address: SocketAddr, path: &str, body: Value) -> Answer {
    read(send(address, post(path, &body)).await).await
}

async fn ask_chat(address: SocketAddr, extra: Value) -> Answer {
    let mut body = chat(extra);
    if body.get("tools").is_none() {
        body["tools"] = tools();
    }
    ask(address, "/v1/chat/completions", body).await
}

fn message_body(extra: Value) -> Value {
    let mut body = chat(json!({"max_tokens": 500, "tools": [{"name": "f", "input_schema": {"type": "object"}}]}));
    body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    body
}

fn response_body(extra: Value) -> Value {
    let mut body =
        json!({"model": MODEL, "input": "Say it", "store": false, "tools": [{"type": "function", "name": "f"}]});
    body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    body
}

/// What a chat stream says, put together as clients do.
fn put_together(body: &str) -> Value {
    let mut whole = json!({"content": "", "reasoning_content": "", "tool_calls": [], "finish_reason": null});
    let add = |to: &mut Value, more: Option<&Value>| {
        if let Some(more) = more.and_then(Value::as_str) {
            *to = format!("{}{more}", to.as_str().unwrap()).into();
        }
    };
    for event in events(body).into_iter().filter(|event| *event != "[DONE]") {
        let event: Value = serde_json::from_str(event).unwrap();
        let choice = &event["choices"][0];
        let delta = &choice["delta"];
        add(&mut whole["content"], delta.get("content"));
        add(&mut whole["reasoning_content"], delta.get("reasoning_content"));
        for call in delta.get("tool_calls").and_then(Value::as_array).into_iter().flatten() {
            let index = usize::try_from(call["index"].as_u64().unwrap()).unwrap();
            let calls = whole["tool_calls"].as_array_mut().unwrap();
            if index == calls.len() {
                assert!(call["id"].as_str().unwrap().starts_with("call_"));
                calls.push(json!({"name": call["function"]["name"], "arguments": ""}));
            }
            add(&mut calls[index]["arguments"], call["function"].get("arguments"));
        }
        if !choice["finish_reason"].is_null() {
            whole["finish_reason"] = choice["finish_reason"].clone();
        }
    }
    whole
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_chat_calls_a_tool_whole_and_as_a_stream() {
    let worker = TestWorker::start_with_template(Script::Answer(CALL), QWEN).await;
    let router = router(settings(), &[&worker]).await;
    let address = router.addresses().http_address;
    let answer = ask_chat(address, json!({})).await;
    assert_eq!(200, answer.status, "{}", answer.body);
    let choice = &answer.json()["choices"][0];
    let call = &choice["message"]["tool_calls"][0];
    assert_eq!(json!({"name": "f", "arguments": "{\"a\":  1}"}), call["function"]);
    assert_eq!(
        (json!("I look.\n"), json!("Where?"), json!("tool_calls")),
        (
            choice["message"]["content"].clone(),
            choice["message"]["reasoning_content"].clone(),
            choice["finish_reason"].clone()
        )
    );
    // From behind `<think>`, which is seven tokens of the scripted engine, to the end of `</think>`.
    assert_eq!(json!(16), answer.json()["usage"]["completion_tokens_details"]["reasoning_tokens"]);

    let streamed = ask_chat(address, json!({"stream": true})).await;
    assert!(streamed.body.ends_with("data: [DONE]\n\n"));
    assert_eq!(
        json!({"content": "I look.\n", "reasoning_content": "Where?", "finish_reason": "tool_calls",
            "tool_calls": [{"name": "f", "arguments": "{\"a\":  1}"}]}),
        put_together(&streamed.body)
    );
    let hidden = put_together(&ask_chat(address, json!({"stream": true, "include_reasoning": false})).await.body);
    assert_eq!(json!(""), hidden["reasoning_content"]);
    // Without tools it is what it is: text.
    let plain = ask_chat(address, json!({"tools": []})).await.json();
    assert!(plain["choices"][0]["message"]["content"].as_str().unwrap().contains("<tool_call>"));
    assert_eq!("stop", plain["choices"][0]["finish_reason"]);
    router.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_other_apis_call_tools_in_their_own_words() {
    let worker = TestWorker::start_with_template(Script::Answer(CALL), QWEN).await;
    let router = router(settings(), &[&worker]).await;
    let address = router.addresses().http_address;
    let message = ask(address, "/v1/messages", message_body(json!({}))).await.json();
    let id = message["content"][2]["id"].clone();
    assert_eq!(
        json!([{"type": "thinking", "thinking": "Where?", "signature": ""}, {"type": "text", "text": "I look.\n"},
            {"type": "tool_use", "id": id, "name": "f", "input": {"a": 1}}]),
        message["content"]
    );
    assert_eq!("tool_use", message["stop_reason"]);
    let streamed = ask(address, "/v1/messages", message_body(json!({"stream": true}))).await.body;
    assert!(streamed.contains(r#""content_block":{"type":"tool_use","id":"call_"#), "{streamed}");
    assert!(streamed.contains(r#""stop_reason":"tool_use""#));

    let response = ask(address, "/v1/responses", response_body(json!({}))).await.json();
    let kinds: Vec<&str> =
        response["output"].as_array().unwrap().iter().map(|item| item["type"].as_str().unwrap()).collect();
    assert_eq!(["reasoning", "message", "function_call"], kinds[..]);
    assert_eq!(
        (&json!("completed"), &json!("{\"a\":  1}"), &json!("completed")),
        (&response["status"], &response["output"][2]["arguments"], &response["output"][2]["status"])
    );
    let streamed = ask(address, "/v1/responses", response_body(json!({"stream": true}))).await.body;
    assert!(streamed.contains("event: response.function_call_arguments.done\n"), "{streamed}");
    assert!(streamed.contains("event: response.completed\n"));
    router.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_call_that_is_asked_for_is_held_to_a_schema() {
    let worker = TestWorker::start_with_template(Script::Answer(r#"[{"name": "g", "arguments": {}}]"#), QWEN).await;
    let router = router(settings(), &[&worker]).await;
    let address = router.addresses().http_address;
    let answer = ask_chat(address, json!({"tool_choice": "required", "parallel_tool_calls": false})).await.json();
    assert_eq!(json!({"name": "g", "arguments": "{}"}), answer["choices"][0]["message"]["tool_calls"][0]["function"]);
    assert_eq!(
        (Value::Null, json!("tool_calls")),
        (answer["choices"][0]["message"]["content"].clone(), answer["choices"][0]["finish_reason"].clone())
    );
    worker.engine.script(Script::Answer(r#"{"a": 1}"#));
    let named = json!({"tool_choice": {"type": "function", "function": {"name": "f"}}, "stream": true});
    let answer = put_together(&ask_chat(address, named).await.body);
    assert_eq!(json!([{"name": "f", "arguments": "{\"a\": 1}"}]), answer["tool_calls"]);
    let any = ask(address, "/v1/messages", message_body(json!({"tool_choice": {"type": "tool", "name": "f"}}))).await;
    assert_eq!(json!({"a": 1}), any.json()["content"][0]["input"]);
    let schemas: Vec<Value> = worker
        .engine
        .requests
        .lock()
        .iter()
        .map(|request| match request.structured_output.clone().unwrap().constraint.unwrap() {
            Constraint::JsonSchema(schema) => serde_json::from_str(&schema).unwrap(),
            other => panic!("{other:?}"),
        })
        .collect();
    assert_eq!((&json!("array"), &json!(1)), (&schemas[0]["type"], &schemas[0]["maxItems"]));
    assert_eq!(json!({"type": "object"}), schemas[1]);
    assert_eq!(json!({"type": "object"}), schemas[2]);
    router.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_strict_tool_is_held_to_its_schema_when_the_model_decides() {
    let said = "Let me see. <tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": 1}}\n</tool_call>";
    let worker = TestWorker::start_with_template(Script::Answer(said), QWEN).await;
    let router = router(settings(), &[&worker]).await;
    let address = router.addresses().http_address;
    let schema = json!({"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": false});
    let tools = json!([
        {"type": "function", "function": {"name": "f", "parameters": schema, "strict": true}},
        {"type": "function", "function": {"name": "g", "parameters": {"type": "object", "required": ["b"]}}},
    ]);
    let answer = ask_chat(address, json!({"tools": tools})).await.json();
    let message = &answer["choices"][0]["message"];
    assert_eq!(json!({"name": "f", "arguments": "{\"a\": 1}"}), message["tool_calls"][0]["function"], "{answer}");
    assert_eq!("Let me see.", message["content"].as_str().unwrap().trim());
    let constraint = worker.engine.requests.lock()[0].structured_output.clone().unwrap().constraint.unwrap();
    let Constraint::StructuralTag(tag) = constraint else { panic!("{constraint:?}") };
    let tag: Value = serde_json::from_str(&tag).unwrap();
    // A tool that is not strict may be called with whatever is an object.
    let schemas: Vec<&Value> = tag["structures"].as_array().unwrap().iter().map(|one| &one["schema"]).collect();
    assert_eq!((vec![&schema, &json!({"type": "object"})], &json!(["<tool_call>"])), (schemas, &tag["triggers"]));
    let both = json!({"tools": tools, "response_format": {"type": "json_object"}});
    assert_eq!(400, ask_chat(address, both).await.status);
    router.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_call_that_the_budget_cuts_stays_open() {
    let cut = "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": \"x";
    let worker = TestWorker::start_with_template(Script::Cut(cut), QWEN).await;
    let router = router(settings(), &[&worker]).await;
    let address = router.addresses().http_address;
    let choice = ask_chat(address, json!({})).await.json()["choices"][0].clone();
    assert_eq!(
        (json!("{\"a\": \"x"), json!("length")),
        (choice["message"]["tool_calls"][0]["function"]["arguments"].clone(), choice["finish_reason"].clone())
    );
    let streamed = put_together(&ask_chat(address, json!({"stream": true})).await.body);
    assert_eq!(
        (json!([{"name": "f", "arguments": "{\"a\": \"x"}]), json!("length")),
        (streamed["tool_calls"].clone(), streamed["finish_reason"].clone())
    );
    let message = ask(address, "/v1/messages", message_body(json!({}))).await.json();
    assert_eq!(
        (json!({"INVALID_JSON": "{\"a\": \"x"}), json!("max_tokens")),
        (message["content"][0]["input"].clone(), message["stop_reason"].clone())
    );
    for stream in [false, true] {
        let answer = ask(address, "/v1/responses", response_body(json!({"stream": stream}))).await;
        let response = if stream {
            let last = answer.body.trim_end().rsplit_once("\ndata: ").unwrap().1;
            serde_json::from_str::<Value>(last).unwrap()["response"].clone()
        } else {
            answer.json()
        };
        assert_eq!(
            (json!("incomplete"), json!("incomplete"), json!("{\"a\": \"x")),
            (
                response["status"].clone(),
                response["output"][0]["status"].clone(),
                response["output"][0]["arguments"].clone()
            )
        );
    }
    router.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_call_at_most_ends_the_answer_behind_the_first() {
    let two = "<tool_call>{\"name\": \"f\"}</tool_call>\n<tool_call>{\"name\": \"g\"}</tool_call> and on";
    let mut worker = TestWorker::start_with_template(Script::Hold(two), QWEN).await;
    let router = router(settings(), &[&worker]).await;
    let address = router.addresses().http_address;
    let answer = ask_chat(address, json!({"parallel_tool_calls": false})).await.json();
    let message = &answer["choices"][0]["message"];
    assert_eq!((1, &Value::Null), (message["tool_calls"].as_array().unwrap().len(), &message["content"]));
    assert_eq!("tool_calls", answer["choices"][0]["finish_reason"]);
    assert!(matches!(worker.next().await, Seen::Submitted(_)));
    assert!(matches!(worker.next().await, Seen::Aborted(_, AbortReason::StopString)));
    worker.engine.script(Script::Answer(two));
    let answer = ask_chat(address, json!({})).await.json();
    assert_eq!(2, answer["choices"][0]["message"]["tool_calls"].as_array().unwrap().len());
    router.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_a_model_cannot_do_is_refused() {
    // The template of the simulated engine knows no tools.
    let worker = TestWorker::start(0, Script::Answer("x")).await;
    let router = router(settings(), &[&worker]).await;
    let address = router.addresses().http_address;
    for (extra, field) in [(json!({}), "tools"), (json!({"tool_choice": "required"}), "tool_choice")] {
        let refused = ask_chat(address, extra).await;
        assert_eq!(
            (400, field),
            (refused.status, refused.json()["error"]["param"].as_str().unwrap()),
            "{}",
            refused.body
        );
    }
    assert_eq!(200, ask_chat(address, json!({"tool_choice": "none"})).await.status);
    router.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_resource_of_a_model_may_name_its_parsers() {
    let worker = TestWorker::start_with_template(Script::Answer(CALL), QWEN).await;
    let router = router(settings(), &[&worker]).await;
    let address = router.addresses().http_address;
    let named = |tools: &str, reasoning: &str| Model {
        tool_parser: tools.to_owned(),
        reasoning_parser: reasoning.to_owned(),
        ..Model::default()
    };
    assert!(router.apply_cluster_state(&cluster_state_with(2, &[&worker], named("none", "none"))).unwrap());
    let refused = ask_chat(address, json!({})).await;
    assert_eq!((400, json!("tools")), (refused.status, refused.json()["error"]["param"].clone()));
    let plain = ask_chat(address, json!({"tools": []})).await.json();
    assert_eq!(json!(CALL), plain["choices"][0]["message"]["content"]);
    worker.engine.script(Script::Answer("[TOOL_CALLS]f[ARGS]{}"));
    assert!(router.apply_cluster_state(&cluster_state_with(3, &[&worker], named("mistral", ""))).unwrap());
    let answer = ask_chat(address, json!({})).await.json();
    let id = answer["choices"][0]["message"]["tool_calls"][0]["id"].as_str().unwrap().to_owned();
    // What Mistral's templates insist on.
    assert!(id.len() == 9 && id.bytes().all(|byte| byte.is_ascii_alphanumeric()), "{id}");
    router.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_prompt_decides_whether_an_answer_begins_with_thoughts() {
    let worker = TestWorker::start_with_template(Script::Answer("hm\n</think>\n\nYes."), QWEN).await;
    let router = router(settings(), &[&worker]).await;
    let address = router.addresses().http_address;
    for (extra, thoughts, text) in [
        (json!({"chat_template_kwargs": {"enable_thinking": true}}), json!("hm"), "Yes."),
        (json!({"reasoning_effort": "none"}), Value::Null, "hm\n</think>\n\nYes."),
        (json!({}), Value::Null, "hm\n</think>\n\nYes."),
    ] {
        let message = ask_chat(address, extra.clone()).await.json()["choices"][0]["message"].clone();
        let said = (message.get("reasoning_content").cloned().unwrap_or_default(), message["content"].clone());
        assert_eq!((thoughts, json!(text)), said, "{extra}");
    }
    let thinking = json!({"tools": [], "thinking": {"type": "enabled", "budget_tokens": 100}});
    let message = ask(address, "/v1/messages", message_body(thinking)).await.json();
    assert_eq!("hm", message["content"][0]["thinking"]);
    // An answer that a schema constrains has none, wherever the prompt has left the model.
    worker.engine.script(Script::Answer("{}"));
    let constrained = json!({"tools": [], "response_format": {"type": "json_object"},
        "chat_template_kwargs": {"enable_thinking": true}});
    assert_eq!("{}", ask_chat(address, constrained).await.json()["choices"][0]["message"]["content"]);
    router.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_the_assistant_said_and_called_goes_back_into_the_prompt() {
    let worker = TestWorker::start_with_template(Script::Answer("x"), QWEN).await;
    let router = router(settings(), &[&worker]).await;
    let address = router.addresses().http_address;
    let call = json!({"id": "c", "type": "function", "function": {"name": "f", "arguments": "{\"a\": 1}"}});
    let of_chat = json!({"messages": [{"role": "user", "content": "q"},
        {"role": "assistant", "content": null, "reasoning_content": "hm", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "r"}],
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}]});
    let of_messages = json!({"messages": [{"role": "user", "content": "q"},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm", "signature": ""},
            {"type": "tool_use", "id": "c", "name": "f", "input": {"a": 1}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "r"}]}],
        "tools": [{"name": "f"}]});
    let of_responses = json!({"input": [{"role": "user", "content": "q"},
        {"type": "reasoning", "id": "x", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{\"a\": 1}"},
        {"type": "function_call_output", "call_id": "c", "output": "r"}]});
    assert_eq!(200, ask_chat(address, of_chat).await.status);
    assert_eq!(200, ask(address, "/v1/messages", message_body(of_messages)).await.status);
    assert_eq!(200, ask(address, "/v1/responses", response_body(of_responses)).await.status);
    let prompts: Vec<_> = worker.engine.requests.lock().iter().map(|request| request.prompt.clone()).collect();
    assert_eq!(prompts[0], prompts[1]);
    assert_eq!(prompts[0], prompts[2]);
    router.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_choice_that_fails_ends_all() {
    let worker = TestWorker::start_with_template(Script::HalfFail("fine"), QWEN).await;
    let router = router(settings(), &[&worker]).await;
    let address = router.addresses().http_address;
    let failed = ask_chat(address, json!({"n": 2})).await;
    assert_eq!((500, "engine_failed"), (failed.status, failed.json()["error"]["code"].as_str().unwrap()));
    let streamed = ask_chat(address, json!({"n": 2, "stream": true})).await;
    let last = events(&streamed.body).pop().map(str::to_owned).unwrap_or_default();
    assert!(last.contains("\"error\"") && !streamed.body.contains("finish_reason\":\"stop"), "{}", streamed.body);
    router.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn grpc_takes_answers_apart_when_asked() {
    let worker = TestWorker::start_with_template(Script::Answer(CALL), QWEN).await;
    let router = router(settings(), &[&worker]).await;
    let channel =
        tonic::transport::Endpoint::from_shared(format!("http://{}", router.addresses().grpc_address)).unwrap();
    let mut client = RouterServiceClient::new(limited(channel.connect()).await.unwrap());
    let function = prost_types::Struct {
        fields: [(
            "name".to_owned(),
            prost_types::Value { kind: Some(prost_types::value::Kind::StringValue("f".to_owned())) },
        )]
        .into(),
    };
    let tool = prost_types::Struct {
        fields: [(
            "function".to_owned(),
            prost_types::Value { kind: Some(prost_types::value::Kind::StructValue(function)) },
        )]
        .into(),
    };
    let user =
        wire::ChatMessage { role: "user".to_owned(), content: "Say it".to_owned(), ..wire::ChatMessage::default() };
    let conversation = wire::Chat { messages: vec![user], tools: vec![tool], ..wire::Chat::default() };
    let auto = wire::tool_choice::Choice::Mode(wire::ToolMode::Auto.into());
    let form = wire::AnswerForm {
        separate_reasoning: true,
        tool_choice: Some(wire::ToolChoice { choice: Some(auto) }),
        ..wire::AnswerForm::default()
    };
    for form in [Some(form), None] {
        let request = wire::GenerateRequest {
            model: MODEL.to_owned(),
            prompt: Some(wire::Prompt { form: Some(wire::prompt::Form::Chat(conversation.clone())) }),
            answer_form: form.clone(),
            ..wire::GenerateRequest::default()
        };
        let mut messages = limited(client.generate(request)).await.unwrap().into_inner();
        let (mut text, mut thoughts, mut name, mut arguments, mut calls) =
            (String::new(), String::new(), String::new(), String::new(), 0);
        while let Some(message) = limited(messages.message()).await.unwrap() {
            match message.event.unwrap() {
                Event::Delta(delta) => text.push_str(&delta.text),
                Event::Reasoning(delta) => thoughts.push_str(&delta.text),
                Event::Call(call) => {
                    name.push_str(&call.name);
                    arguments.push_str(&call.arguments);
                }
                Event::Finished(finished) => calls = finished.choices[0].complete_calls,
            }
        }
        let said = [text, thoughts, name, arguments];
        if form.is_some() {
            assert_eq!((["I look.\n", "Where?", "f", "{\"a\":  1}"].map(str::to_owned), 1), (said, calls));
        } else {
            assert_eq!(([CALL, "", "", ""].map(str::to_owned), 0), (said, calls));
        }
    }
    router.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_cannot_be_read_is_text_and_counts() {
    let broken = "<tool_call>\nno call\n</tool_call>";
    let worker = TestWorker::start_with_template(Script::Answer(broken), QWEN).await;
    let router = router(settings(), &[&worker]).await;
    let answer = ask_chat(router.addresses().http_address, json!({})).await.json();
    assert_eq!(
        (json!(broken), json!("stop")),
        (answer["choices"][0]["message"]["content"].clone(), answer["choices"][0]["finish_reason"].clone())
    );
    let counted = format!("kvist_router_parse_failures_total{{model=\"{MODEL}\"}} 1");
    let metrics = read(send(router.addresses().admin_address, get("/metrics")).await).await.body;
    assert!(metrics.contains(&counted), "{metrics}");
    router.stop().await;
}
