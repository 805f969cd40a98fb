"""The offline API: a few prompts at once, with the drafting counters of each."""

from outrider import LLM, SamplingParams

if __name__ == "__main__":
    llm = LLM("smollm2-135m")
    params = SamplingParams(temperature=0.0, max_tokens=48)
    questions = ["What is a glacier?", "Name three uses of copper."]
    for output in llm.chat([[{"role": "user", "content": q}] for q in questions], params):
        print(output.outputs[0].text)
        print(f"-> {len(output.outputs[0].token_ids)} tokens in {output.spec.rounds} rounds\n")
