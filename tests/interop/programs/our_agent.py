"""The same training with our agent: it finds the job of NVFLARE that it was launched by."""

import asyncio

from dfm_async.exchange import FlareAgent, Model


async def main() -> None:
    """Adds one to every parameter, round after round."""
    async with FlareAgent.from_environment() as agent:
        async for task in agent:
            name = f"loss of {agent.site} in {agent.job}"
            await agent.log({name: 1.0 / (1 + (task.round or 0))}, step=task.round)
            params = {name: value + 1 for name, value in task.data.params.items()}
            await agent.submit_result(Model(params=params, meta={"NUM_STEPS_CURRENT_ROUND": 1}))
            print(f"round {task.round} of {task.total_rounds} done", flush=True)
        print("the loop has ended", flush=True)


asyncio.run(main())
