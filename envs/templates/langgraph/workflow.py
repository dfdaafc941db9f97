"""An agent of LangGraph with a tool (`pip install langgraph langchain-openai`). It knows nothing of training."""

from typing import Any

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.errors import GraphRecursionError
from langgraph.graph import MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition

from areal_agent import Rollout

from .tasks import score, stock_of

MAX_STEPS = 6  # three answers of the model, and the tool between them


@tool
def stock(item: str) -> str:
    """How many there are of an item."""
    return stock_of(item)


async def solve(task: dict[str, Any], rollout: Rollout) -> float:
    model = ChatOpenAI(
        model=rollout.model, base_url=rollout.base_url, api_key=rollout.api_key, max_retries=0
    ).bind_tools([stock])

    async def ask(state: MessagesState) -> dict[str, Any]:
        return {"messages": [await model.ainvoke(state["messages"])]}

    graph = StateGraph(MessagesState)
    graph.add_node("ask", ask)
    graph.add_node("tools", ToolNode([stock]))
    graph.set_entry_point("ask")
    graph.add_conditional_edges("ask", tools_condition)
    graph.add_edge("tools", "ask")
    start: Any = {"messages": [{"role": "user", "content": task["question"]}]}
    try:
        end = await graph.compile().ainvoke(start, {"recursion_limit": MAX_STEPS})
    except GraphRecursionError:
        return 0.0
    return score(str(end["messages"][-1].content), task["item"])
